"""The drafter's tier: which rows it holds of whom, around a drafter's state."""

from __future__ import annotations

import time

from tierspec.decoding.messages import (
    OutOfPages,
    Propose,
    Proposed,
    ReplyItem,
    TierMessage,
    TierReply,
    UnknownPrefix,
)
from tierspec.decoding.prefix_hash import PrefixHash
from tierspec.drafters.protocol import Drafter, DraftRequest
from tierspec.models import CacheFull


class DrafterTier:
    """The neural drafter: one batched `propose` per message."""

    def __init__(self, drafter: Drafter, *, token_budget: int) -> None:
        """`token_budget`: rows of its cache; that of the verifier suffices."""
        self._state = drafter.new_state(token_budget)
        self._hashes: dict[str, PrefixHash] = {}

    def handle(self, message: TierMessage) -> TierReply:
        """Forgets what is released, then takes in and drafts for every item whose rows are held."""
        started = time.perf_counter()
        for sequence_id in message.releases:
            self._forget(sequence_id)
        items: list[Propose] = []
        requests: list[DraftRequest] = []
        replies: dict[str, ReplyItem] = {}
        row = 0
        for item in message.items:
            assert isinstance(item, Propose) and message.features is not None
            features = message.features[row : row + len(item.token_ids)]
            row += len(item.token_ids)
            if item.base != item.origin and self._hash_at(item) != item.prefix_hash:
                self._forget(item.sequence_id)
                replies[item.sequence_id] = UnknownPrefix(item.sequence_id, item.round_id, 0)
                continue
            items.append(item)
            requests.append(
                DraftRequest(
                    item.sequence_id,
                    item.base,
                    item.token_ids,
                    features,
                    item.max_tokens,
                    item.sampling,
                    item.origin,
                    item.min_survival,
                )
            )
        for item, reply in zip(items, self._propose(items, requests), strict=True):
            replies[item.sequence_id] = reply
        ordered = [replies[item.sequence_id] for item in message.items]
        return TierReply(message.tier, message.tick, ordered, time.perf_counter() - started)

    def _propose(self, items: list[Propose], requests: list[DraftRequest]) -> list[ReplyItem]:
        try:
            drafts = self._state.propose(requests)
        except CacheFull:
            return [OutOfPages(item.sequence_id, item.round_id) for item in items]
        for item in items:
            hashes = self._hashes.get(item.sequence_id)
            if hashes is None or item.base == item.origin:
                hashes = self._hashes[item.sequence_id] = PrefixHash(item.base + 1, item.prefix_hash)
            hashes.truncate(item.base + 1)
            hashes.extend(item.token_ids)
        return [Proposed(item.sequence_id, item.round_id, ids) for item, ids in zip(items, drafts, strict=True)]

    def _hash_at(self, item: Propose) -> int | None:
        """Hash of the tokens that the rows before the item's base depend on; None if they are not held."""
        hashes = self._hashes.get(item.sequence_id)
        if hashes is None or hashes.start != item.origin + 1:
            return None
        return hashes.at(item.base + 1)

    def _forget(self, sequence_id: str) -> None:
        self._state.release(sequence_id)
        self._hashes.pop(sequence_id, None)
