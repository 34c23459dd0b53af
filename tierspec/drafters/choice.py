"""The tokens that a drafter proposes from its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.sampling import RowSampling, greedy_choice, target_choice


class DraftChoice:
    """The keyed choice that the target would make from a drafter's logits (arXiv 2408.07978), over the tokens that the
    drafter knows."""

    def __init__(self, vocabulary: DraftVocabulary, device: torch.device) -> None:
        self.target_ids = vocabulary.target_ids.to(device)
        self._columns = vocabulary.columns.to(device)

    def __call__(self, logits_NC: Tensor, sampling: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
        """Draft columns int64 [N]; `positions`: of the chosen tokens in their sequences."""
        if all(row.greedy for row in sampling):
            return greedy_choice(logits_NC)
        chosen = target_choice(
            logits_NC,
            [row.temperature for row in sampling],
            [row.top_k for row in sampling],
            [row.top_p for row in sampling],
            [row.seed for row in sampling],
            [row.stream for row in sampling],
            positions,
            ids=self.target_ids,
        )
        return self._columns[chosen]
