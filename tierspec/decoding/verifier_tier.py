"""The full model's tier: one ragged forward per message, then the one acceptance rule, then rollback.

It can be thrown away at any time. Whether it lives in this process or in an actor elsewhere is the caller's business.

Legend: R rows of a forward, C rows to choose at, B items to verify, K longest draft, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from tierspec.decoding.messages import (
    OutOfPages,
    Prefill,
    Prefilled,
    Propose,
    ReplyItem,
    TierMessage,
    TierReply,
    UnknownPrefix,
    Verified,
    Verify,
)
from tierspec.decoding.prefix_hash import PrefixHash
from tierspec.drafters.protocol import FeatureProjection
from tierspec.models import PAGE_TOKENS, CacheSequence, Step, Target
from tierspec.sampling import RowSampling
from tierspec.verification import greedy_prefix, load_policy, target_choice

_CHUNK_ROWS = 512  # rows whose logits exist at once
_policy = cache(load_policy)


@dataclass(slots=True)
class _Held:
    cache: CacheSequence
    hashes: PrefixHash = field(default_factory=PrefixHash)


@dataclass(slots=True)
class _Work:
    """An item under way: its rows of the forward start at `row`, the first `kept` of them stay."""

    index: int
    item: Prefill | Verify
    held: _Held
    row: int
    kept: int
    next_token: int = -1


class VerifierTier:
    """Holds KV per sequence and answers Prefill and Verify, prompts and drafts in one forward."""

    def __init__(
        self,
        target: Target,
        *,
        token_budget: int,
        projection: FeatureProjection | None = None,
        feature_layers: Sequence[int] = (),
    ) -> None:
        """`projection` makes a drafter's feature rows of the hidden states at `feature_layers`; both are the drafter's.

        `token_budget`: tokens of KV cache, in whole pages.
        """
        self._decoder = target.decoder
        self._cache = target.decoder.new_cache(token_budget)
        self._projection = projection
        self._feature_layers = tuple(feature_layers)
        self._held: dict[str, _Held] = {}

    def handle(self, message: TierMessage) -> TierReply:
        """Forgets what is released, then forwards every item whose prefix is held and whose rows fit."""
        started = time.perf_counter()
        for sequence_id in message.releases:
            self._forget(sequence_id)
        replies: list[ReplyItem | None] = [None] * len(message.items)
        works: list[_Work] = []
        rows = reserved_pages = 0
        for index, item in enumerate(message.items):
            assert not isinstance(item, Propose)
            held = self._place(item)
            if isinstance(held, int):
                replies[index] = UnknownPrefix(item.sequence_id, item.round_id, held)
                continue
            count = len(item.token_ids)
            pages = -(-(item.base + count) // PAGE_TOKENS) - len(held.cache.pages)
            if (reserved_pages + pages) * PAGE_TOKENS > self._cache.free_tokens:
                replies[index] = OutOfPages(item.sequence_id, item.round_id)
                continue
            works.append(_Work(index, item, held, rows, count))
            rows += count
            reserved_pages += pages
        features = self._forward(works, rows) if works else None
        for work in works:
            replies[work.index] = self._settle(work)
        return TierReply(message.tier, message.tick, [r for r in replies if r], time.perf_counter() - started, features)

    def _place(self, item: Prefill | Verify) -> _Held | int:
        """What is held of the item's sequence, rolled back to the item's base; else how much may be built on."""
        held = self._held.get(item.sequence_id)
        if held is None:
            if item.base:
                return 0
            held = self._held[item.sequence_id] = _Held(self._cache.sequence())
        if len(held.hashes) < item.base:
            return len(held.hashes)
        if held.hashes.at(item.base) != item.prefix_hash:
            self._forget(item.sequence_id)
            return 0
        held.hashes.truncate(item.base)
        held.cache.truncate(item.base)
        return held

    def _forget(self, sequence_id: str) -> None:
        if (held := self._held.pop(sequence_id, None)) is not None:
            held.cache.release()

    def _forward(self, works: list[_Work], rows: int) -> Tensor | None:
        """Runs the rows, chooses and accepts; returns the feature rows [n, d] of what stays, where they are wanted."""
        wanted = self._projection is not None and any(work.item.want_features for work in works)
        hidden = self._decoder.forward(
            [Step(work.held.cache, work.item.token_ids) for work in works],
            self._cache,
            features=self._feature_layers if wanted else (),
        )
        verifies = [work for work in works if isinstance(work.item, Verify)]
        for chunk in _chunks(verifies):
            self._choose(chunk, hidden.last)
        if not wanted:
            return None
        assert self._projection is not None
        index = [r for work in works if work.item.want_features for r in range(work.row, work.row + work.kept)]
        captured = hidden.features
        if len(index) < rows:
            index_n = torch.tensor(index, device=hidden.last.device)
            captured = {layer: rows_RD[index_n] for layer, rows_RD in captured.items()}
        return self._projection(captured)

    def _choose(self, works: list[_Work], hidden_RD: Tensor) -> None:
        """Sets `kept` and `next_token` of items to verify; one transfer from the device."""
        drafts: list[list[int]] = []
        first_rows: list[int] = []
        rows: list[int] = []
        samplings: list[RowSampling] = []
        policies: list[str] = []
        positions: list[int] = []
        for work in works:
            item = work.item
            assert isinstance(item, Verify)
            committed, choices = len(item.token_ids) - item.num_drafts, item.num_drafts + 1
            drafts.append(item.token_ids[committed:])
            policies.append(item.policy)
            first_rows.append(len(rows))
            rows.extend(range(work.row + committed - 1, work.row + committed - 1 + choices))
            samplings.extend([item.sampling] * choices)
            positions.extend(range(item.base + committed, item.base + committed + choices))
        device = hidden_RD.device
        if len(rows) < hidden_RD.shape[0]:
            hidden_RD = hidden_RD[torch.tensor(rows, device=device)]
        logits_CV = self._decoder.logits(hidden_RD)
        choice_C = target_choice(
            logits_CV,
            [s.temperature for s in samplings],
            [s.top_k for s in samplings],
            [s.top_p for s in samplings],
            [s.seed for s in samplings],
            [s.stream for s in samplings],
            positions,
        )
        first_B = torch.tensor(first_rows, device=device)
        accepted_B = torch.zeros_like(first_B)
        if (longest := max(map(len, drafts))) > 0:
            draft_BK = torch.tensor([d + [-1] * (longest - len(d)) for d in drafts], device=device)
            place_BK = (first_B[:, None] + torch.arange(longest, device=device)).clamp_(max=len(rows) - 1)
            accepted_B = greedy_prefix(draft_BK, choice_C[place_BK])
            for i, (name, draft, first) in enumerate(zip(policies, drafts, first_rows, strict=True)):
                if draft and name != "strict":
                    block = slice(first, first + len(draft) + 1)
                    accepted_B[i] = _policy(name).accept(draft_BK[i, : len(draft)], choice_C[block], logits_CV[block])
        results = torch.stack((accepted_B, choice_C[first_B + accepted_B]), 1).tolist()
        for work, draft, (accepted, next_token) in zip(works, drafts, results, strict=True):
            work.kept = len(work.item.token_ids) - len(draft) + accepted
            work.next_token = next_token

    def _settle(self, work: _Work) -> Prefilled | Verified:
        """Rolls the rejected rows back and answers."""
        item, held, kept = work.item, work.held, work.kept
        held.hashes.extend(item.token_ids[:kept])
        if kept < len(item.token_ids):
            held.cache.truncate(item.base + kept)
        num_features = kept if item.want_features and self._projection is not None else 0
        if isinstance(item, Prefill):
            return Prefilled(item.sequence_id, item.round_id, item.base + kept, num_features)
        accepted = kept - (len(item.token_ids) - item.num_drafts)
        return Verified(item.sequence_id, item.round_id, accepted, work.next_token, num_features)


def _chunks(works: list[_Work]) -> Iterator[list[_Work]]:
    """Cuts a batch so that the rows to choose from stay few, whatever the batch."""
    chunk: list[_Work] = []
    rows = 0
    for work in works:
        assert isinstance(work.item, Verify)
        if chunk and rows + work.item.num_drafts + 1 > _CHUNK_ROWS:
            yield chunk
            chunk, rows = [], 0
        chunk.append(work)
        rows += work.item.num_drafts + 1
    if chunk:
        yield chunk
