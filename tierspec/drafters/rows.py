"""The rows that a drafter holds of many sequences: a place in its paged cache for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tierspec.drafters.config import DrafterConfig
from tierspec.drafters.protocol import DraftRequest, UnknownPrefix
from tierspec.models import CacheFull, CacheSequence, KVCache


@dataclass(slots=True)
class _Held:
    origin: int
    rows: CacheSequence


class DrafterRows:
    """Base of drafter states: which rows of which sequence are held. Row numbers count from the sequence's beginning,
    not from its origin."""

    def __init__(
        self,
        config: DrafterConfig,
        *,
        layers: Sequence[int],
        token_budget: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layers`: numbers of the attention layers that keep keys and values, for `token_budget` rows in all."""
        self._cache = KVCache(
            layers=layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            token_budget=token_budget,
            dtype=dtype,
            device=device,
        )
        self._held: dict[str, _Held] = {}

    def held(self, sequence_id: str) -> int:
        """The first row of the sequence that is not held, 0 for an unknown one."""
        entry = self._held.get(sequence_id)
        return entry.origin + entry.rows.length if entry else 0

    def release(self, sequence_id: str) -> None:
        """Forgets a sequence; unknown ones are ignored."""
        if entry := self._held.pop(sequence_id, None):
            entry.rows.release()

    def admit(self, requests: Sequence[DraftRequest], drafted: Sequence[int]) -> list[CacheSequence]:
        """Each request's sequence, cut back to its base, with room for its rows and for `drafted` more.

        Raises:
            UnknownPrefix: a request builds on rows that are not held; nothing was changed.
            CacheFull: the rows do not fit; no row was added.
        """
        unknown = [r.sequence_id for r in requests if r.base != r.origin and not self._is_held(r)]
        if unknown:
            raise UnknownPrefix(unknown)
        fresh: list[str] = []
        rows = []
        try:
            for request, more in zip(requests, drafted, strict=True):
                if not request.token_ids or request.features.shape[0] != len(request.token_ids):
                    raise ValueError(f"sequence {request.sequence_id}: one feature row per token, and at least one")
                entry = self._held.get(request.sequence_id)
                if entry is None:
                    entry = self._held[request.sequence_id] = _Held(request.origin, self._cache.sequence())
                    fresh.append(request.sequence_id)
                entry.origin = request.origin
                entry.rows.truncate(request.base - request.origin)
                rows.append(entry.rows)
                entry.rows.reserve(len(request.token_ids) + more)
        except (CacheFull, ValueError):
            for sequence in rows:
                sequence.truncate(sequence.length)
            for sequence_id in fresh:
                self.release(sequence_id)
            raise
        return rows

    def _is_held(self, request: DraftRequest) -> bool:
        entry = self._held.get(request.sequence_id)
        return entry is not None and entry.origin == request.origin and request.base <= self.held(request.sequence_id)


def longest_draft(request: DraftRequest, trained_for: int, max_context: int, *, unwritten: int) -> int:
    """Drafts that are wanted, that the drafter was trained for, and whose rows have a position in its context.
    `unwritten`: of how many drafts more than rows written while drafting.

    Raises:
        ValueError: the request's own rows exceed the context.
    """
    end = request.base - request.origin + len(request.token_ids)
    if end > max_context:
        raise ValueError(f"sequence {request.sequence_id}: {end} rows exceed the context of the drafter")
    return max(0, min(request.max_tokens, trained_for, max_context - end + unwritten))
