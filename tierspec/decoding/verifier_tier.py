"""The full model's tier: one ragged forward per message, then the one acceptance rule, then rollback.

It can be thrown away at any time. Whether it lives in this process or in an actor elsewhere is the caller's business.

Legend: R rows of a forward, C rows to choose at, B items to verify, K longest draft, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
from tierspec.verification import Allowance, budgeted_prefix, greedy_prefix, target_choice
from tierspec.verification.budgeted import NEVER

_CHUNK_ROWS = 512  # rows whose logits exist at once
_STRICT = Allowance(0.0, 0.0, 0)


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
    exceptions: tuple[tuple[int, float], ...] = ()


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
        allowances: list[Allowance | None] = []
        positions: list[int] = []
        for work in works:
            item = work.item
            assert isinstance(item, Verify)
            committed, choices = len(item.token_ids) - item.num_drafts, item.num_drafts + 1
            drafts.append(item.token_ids[committed:])
            allowances.append(item.allowance)
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
        costs: list[list[float]] = []
        if (longest := max(map(len, drafts))) > 0:
            draft_BK = torch.tensor([d + [-1] * (longest - len(d)) for d in drafts], device=device)
            place_BK = (first_B[:, None] + torch.arange(longest, device=device)).clamp_(max=len(rows) - 1)
            choice_BK = choice_C[place_BK]
            if any(allowances):
                lengths = torch.tensor([len(draft) for draft in drafts], device=device)
                accepted_B, cost_BK = _budgeted(draft_BK, choice_BK, lengths, allowances, logits_CV, place_BK)
                costs = cost_BK.tolist()
            else:
                accepted_B = greedy_prefix(draft_BK, choice_BK)
        results = torch.stack((accepted_B, choice_C[first_B + accepted_B]), 1).tolist()
        for i, (work, draft, (accepted, next_token)) in enumerate(zip(works, drafts, results, strict=True)):
            work.kept = len(work.item.token_ids) - len(draft) + accepted
            work.next_token = next_token
            if costs and allowances[i]:
                work.exceptions = tuple((k, cost) for k, cost in enumerate(costs[i][:accepted]) if cost >= 0)

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
        return Verified(item.sequence_id, item.round_id, accepted, work.next_token, num_features, work.exceptions)


def _budgeted(
    draft_BK: Tensor,
    choice_BK: Tensor,
    length_B: Tensor,
    allowances: Sequence[Allowance | None],
    logits_CV: Tensor,
    place_BK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts `[B]`, and `[B, K]` the regret of every draft that is not the choice (-1 where it is).

    Rows without allowance are verified strictly. Regret is taken from the same logits as the choice, in float64.
    """
    device = draft_BK.device
    rows = [allowance or _STRICT for allowance in allowances]
    top_BK = logits_CV[place_BK, choice_BK].double()
    regret_BK = (top_BK - logits_CV[place_BK, draft_BK.clamp_min(0)].double()).clamp_min_(0.0)
    for ids in {row.protected_ids for row in rows if row.protected_ids}:
        ids_N = torch.tensor(ids, device=device)
        protected_BK = torch.isin(draft_BK, ids_N) | torch.isin(choice_BK, ids_N)
        of_row_B = torch.tensor([row.protected_ids == ids for row in rows], device=device)
        regret_BK.masked_fill_(protected_BK & of_row_B[:, None], NEVER)
    accepted_B, _ = budgeted_prefix(
        draft_BK,
        choice_BK,
        regret_BK,
        gate=torch.tensor([row.gate for row in rows], dtype=torch.float64, device=device),
        cap=torch.tensor([row.cap for row in rows], device=device),
        remaining=torch.tensor([row.remaining for row in rows], dtype=torch.float64, device=device),
        length=length_B,
        ties_need_budget=torch.tensor([row.ties_need_budget for row in rows], device=device),
    )
    return accepted_B, torch.where(draft_BK == choice_BK, -1.0, regret_BK)


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
