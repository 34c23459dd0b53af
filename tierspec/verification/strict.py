"""Strict verification: a draft token is kept iff it equals the target's choice at its position (arXiv 2408.07978).

Greedy and sampled requests share the test, since the target's choice is keyed (`target_choice`), so the text does not
depend on the drafter.
"""

from torch import Tensor

from tierspec.sampling.choice import target_choice
from tierspec.verification.rejection import rejection_sample

__all__ = ["greedy_prefix", "rejection_sample", "target_choice"]


def greedy_prefix(draft_ids: Tensor, top_ids: Tensor) -> Tensor:
    """How many leading draft tokens equal the target's choices: `[..., K]`, `[..., K]` -> int64 `[...]`."""
    return (draft_ids == top_ids).long().cumprod(dim=-1).sum(dim=-1)
