"""What the frozen target says about a sequence: captured layers, final hidden states and its own choices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierspec.models import Decoder, Step
from tierspec.sampling import greedy_choice

_LOGIT_ROWS = 128


@dataclass(frozen=True)
class SequenceFeatures:
    """Of one sequence of T tokens. Captured states are before the final norm, `last` is after it.

    captured [T, F]: the feature layers, concatenated in their order; last [T, E]; top_ids int64 [T]: the target's
    choice for the next token, -1 for rows where nobody asks for it.
    """

    captured: Tensor
    last: Tensor
    top_ids: Tensor

    @property
    def nbytes(self) -> int:
        """Memory it holds, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.captured, self.last, self.top_ids))


class TargetFeatures:
    """Runs the target over sequences, one at a time so that a sequence's features depend on itself alone, and keeps
    the first ones that fit into `cache_bytes` (an epoch asks for each once, so replacing would only thrash)."""

    def __init__(self, decoder: Decoder, layers: Sequence[int], *, max_length: int, cache_bytes: int = 0) -> None:
        decoder.check_features(layers)
        self._decoder = decoder
        self._layers = tuple(layers)
        self._cache = decoder.new_cache(max_length)
        self._kept: dict[int, SequenceFeatures] = {}
        self._free_bytes = cache_bytes

    def __call__(
        self, key: int, token_ids: Sequence[int], first_choice: int, *, greedy: bool = False
    ) -> SequenceFeatures:
        """Features of the sequence that `key` numbers for as long as this object lives.

        `top_ids` begins at row `first_choice`. `greedy`: the caller knows that the tokens from there on are this
        target's own greedy choices, which spares its head, a seventh of the work.
        """
        if key in self._kept:
            return self._kept[key]
        features = self._compute(token_ids, first_choice, greedy)
        if features.nbytes <= self._free_bytes:
            self._free_bytes -= features.nbytes
            self._kept[key] = features
        return features

    @torch.no_grad()
    def _compute(self, token_ids: Sequence[int], first_choice: int, greedy: bool) -> SequenceFeatures:
        sequence = self._cache.sequence()
        try:
            hidden = self._decoder.forward([Step(sequence, token_ids)], self._cache, features=self._layers)
        finally:
            sequence.release()
        captured = torch.cat([hidden.features[layer] for layer in self._layers], -1)
        top_ids = torch.full((len(token_ids),), -1, dtype=torch.int64, device=hidden.last.device)
        if greedy:
            top_ids[first_choice:-1] = torch.tensor(token_ids[first_choice + 1 :])
        else:
            for start in range(first_choice, len(token_ids), _LOGIT_ROWS):
                rows = slice(start, start + _LOGIT_ROWS)
                top_ids[rows] = greedy_choice(self._decoder.logits(hidden.last[rows]))
        return SequenceFeatures(captured, hidden.last, top_ids)
