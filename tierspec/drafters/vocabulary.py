"""The pruned draft vocabulary: which target tokens the drafter can propose, and the two maps between them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """`target_ids` int64 [C], ascending: the target id of every draft column; `vocab_size`: the target's V."""

    target_ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.dim() != 1 or not ids.numel() or ids.dtype != torch.int64:
            raise ValueError("a draft vocabulary needs a list of target ids")
        if (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ValueError(f"draft vocabulary: target ids must rise strictly within 0 to {self.vocab_size - 1}")

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int) -> "DraftVocabulary":
        """The `size` tokens with the highest counts [V]; ties and padding by lowest id (arXiv 2503.01840; the padding
        to a size that does not depend on the corpus is our choice)."""
        size = min(size, counts.numel())
        order = counts.sort(descending=True, stable=True).indices
        return cls(order[:size].sort().values, counts.numel())

    @classmethod
    def from_maps(cls, d2t: Tensor, t2d: Tensor) -> "DraftVocabulary":
        """From the two tensors of a checkpoint. ValueError if they do not describe the same set."""
        ids = d2t.to(torch.int64) + torch.arange(d2t.numel())
        if not torch.equal(t2d.nonzero()[:, 0], ids):
            raise ValueError("d2t and t2d disagree")
        return cls(ids, t2d.numel())

    @property
    def size(self) -> int:
        """Number of draft columns C."""
        return self.target_ids.numel()

    @property
    def d2t(self) -> Tensor:
        """int64 [C] offsets: target id = column + d2t[column]."""
        return self.target_ids - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        """bool [V]: whether the drafter knows a target token; the k-th true entry is column k."""
        return self.columns >= 0

    @property
    def columns(self) -> Tensor:
        """int64 [V]: the draft column of every target id, -1 where there is none."""
        columns = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        columns[self.target_ids] = torch.arange(self.size)
        return columns

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens [V] that the drafter can propose; 1 if nothing was counted."""
        total = counts.sum().item()
        return counts[self.target_ids].sum().item() / total if total else 1.0
