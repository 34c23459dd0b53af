"""What the frozen target says about a sequence: captured layers, final hidden states and its own choices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierspec.models import PAGE_TOKENS, Decoder, Step
from tierspec.sampling import greedy_choice

_LOGIT_ROWS = 128
_FORWARD_ROWS = 2048


@dataclass(frozen=True)
class SequenceFeatures:
    """Of one sequence of T tokens. Captured states are before the final norm, `last` is after it.

    captured [T, F]: the feature layers, concatenated in their order; last [T, E]; top_ids int64 [T]: the target's
    choice for the next token, -1 for rows where nobody asks for it; log_normaliser float32 [T]: log-sum-exp of its
    logits there (0 elsewhere), if it was asked for.
    """

    captured: Tensor
    last: Tensor
    top_ids: Tensor
    log_normaliser: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory it holds, in bytes."""
        tensors = (self.captured, self.last, self.top_ids, self.log_normaliser)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True)
class FeatureRequest:
    """`key` numbers the sequence for the life of a `TargetFeatures`. Rows from `first_choice` on get their `top_ids`;
    `greedy`: the tokens behind it are known to be this target's own greedy choices, which spares its head, a seventh of
    the work."""

    key: int
    token_ids: Sequence[int]
    first_choice: int
    greedy: bool = False


class TargetFeatures:
    """Runs the target over sequences and keeps the features of the first ones that fit into `cache_bytes` (an epoch
    asks for each once, so replacing would only thrash).

    A sequence's features depend on itself alone. Sequences share a forward pass where invariant numerics see to that.
    """

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[int],
        *,
        max_length: int,
        cache_bytes: int = 0,
        with_normaliser: bool = False,
    ) -> None:
        decoder.check_features(layers)
        self._decoder = decoder
        self._layers = tuple(layers)
        self._together = decoder.numerics == "invariant"
        self._rows = max(max_length, _FORWARD_ROWS) if self._together else max_length
        self._cache = decoder.new_cache(self._rows)
        self._kept: dict[int, SequenceFeatures] = {}
        self._free_bytes = cache_bytes
        self._with_normaliser = with_normaliser

    def __call__(self, requests: Sequence[FeatureRequest]) -> list[SequenceFeatures]:
        """The features of every request, in order."""
        missing = {request.key: request for request in requests if request.key not in self._kept}
        computed: dict[int, SequenceFeatures] = {}
        for group in self._groups(list(missing.values())):
            for request, features in zip(group, self._compute(group), strict=True):
                computed[request.key] = features
                if features.nbytes <= self._free_bytes:
                    self._free_bytes -= features.nbytes
                    self._kept[request.key] = features
        return [computed.get(request.key) or self._kept[request.key] for request in requests]

    def _groups(self, requests: list[FeatureRequest]) -> Iterator[list[FeatureRequest]]:
        """Requests that share a forward pass: one, unless the numerics are invariant, or as many as the cache holds."""
        while requests:
            count = pages = 0
            for request in requests:
                pages += -(-len(request.token_ids) // PAGE_TOKENS)
                if count and (not self._together or pages * PAGE_TOKENS > self._rows):
                    break
                count += 1
            yield requests[:count]
            requests = requests[count:]

    @torch.no_grad()
    def _compute(self, group: list[FeatureRequest]) -> list[SequenceFeatures]:
        sequences = [self._cache.sequence() for _ in group]
        steps = [Step(sequence, request.token_ids) for sequence, request in zip(sequences, group, strict=True)]
        try:
            hidden = self._decoder.forward(steps, self._cache, features=self._layers)
        finally:
            for sequence in sequences:
                sequence.release()
        lengths = [len(request.token_ids) for request in group]
        captured = torch.cat([hidden.features[layer] for layer in self._layers], -1).split(lengths)
        return [
            SequenceFeatures(of_layers.clone(), last.clone(), *self._choices(request, last))
            for request, of_layers, last in zip(group, captured, hidden.last.split(lengths), strict=True)
        ]

    def _choices(self, request: FeatureRequest, last: Tensor) -> tuple[Tensor, Tensor | None]:
        """`top_ids` and `log_normaliser` of a sequence."""
        first, ids = request.first_choice, request.token_ids
        top_ids = torch.full((len(ids),), -1, dtype=torch.int64, device=last.device)
        normaliser = last.new_zeros(len(ids), dtype=torch.float32) if self._with_normaliser else None
        if request.greedy:
            top_ids[first:-1] = torch.tensor(ids[first + 1 :])
            if normaliser is None:
                return top_ids, None
        for start in range(first, len(ids), _LOGIT_ROWS):
            rows = slice(start, start + _LOGIT_ROWS)
            logits = self._decoder.logits(last[rows])
            if not request.greedy:
                top_ids[rows] = greedy_choice(logits)
            if normaliser is not None:
                normaliser[rows] = logits.float().logsumexp(-1)
        return top_ids, normaliser
