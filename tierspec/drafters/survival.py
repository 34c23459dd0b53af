"""Where to stop drafting: the verification head's belief that a draft token survives (arXiv 2608.30135 section 5.3).

The belief in token k is read from the state that token k is drawn from, before it is drawn, so that stopping there does
not depend on the token and biases no acceptance rule.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class SurvivalHead:
    """A trained verification head: linear, from the state before the token head to a logit."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """`weights`: weight [1, D] and bias [1], as in a checkpoint."""
        self._weight = weights["weight"].to(device, torch.float32)[0]
        self._bias = weights["bias"].to(device, torch.float32)

    def survives(self, states_ND: Tensor, least: Sequence[float]) -> Tensor:
        """Whether each row's predicted probability of survival reaches its own least one: bool [N]."""
        belief = torch.sigmoid(states_ND.float() @ self._weight + self._bias)
        return belief >= torch.tensor(least, dtype=torch.float32, device=belief.device)
