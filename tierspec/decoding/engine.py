"""The round, written once: propose, verify, commit, for all live sequences of a tick, without any input or output.

`plan` gives at most one message per tier, `absorb` commits a reply. Continuous batching: sequences join and leave at
ticks, prompts go in by chunks beside the decoding rows. A group of sequences is in lockstep: its drafts are made in one
message, then verified in another. Two groups take turns, so that drafter and verifier work at the same time.

Under strict verification what is committed depends on prompt, sampling parameters and seed alone (arXiv 2408.07978):
drafts, budgets, lost tiers and the order of replies only change how soon it comes. A lossy policy makes it depend on
the drafts, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tierspec.decoding.detokenizer import Decode
from tierspec.decoding.draft_sources import DraftSources
from tierspec.decoding.event import Event
from tierspec.decoding.limits import DrafterInfo, EngineLimits
from tierspec.decoding.messages import (
    Item,
    OutOfPages,
    Prefilled,
    Proposed,
    TierMessage,
    TierName,
    TierReply,
    UnknownPrefix,
    Verified,
)
from tierspec.decoding.scheduler import Group, Scheduler
from tierspec.decoding.sequence import Sequence
from tierspec.decoding.slot import Slot
from tierspec.decoding.stats import DecodingStats
from tierspec.decoding.stopping import OutputEnd
from tierspec.decoding.tier_line import TierLine
from tierspec.errors import SettingError


class Engine:
    """All sequences of a cell, from arrival to end. Not thread-safe: one thread calls it.

    `stats` adds up the sequences that have ended; its `verifier_calls` counts messages, not sequences.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        drafter: DrafterInfo | None = None,
        sources: DraftSources | None = None,
        decode: Decode | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """`decode` turns token ids to text (special tokens left out); without it there is none, and no stop strings."""
        self.limits = limits
        self.stats = DecodingStats()
        self._drafter_info = drafter
        self._sources = sources or DraftSources()
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._scheduler = Scheduler(limits, limits.groups if drafter else 1)
        self._running = self._scheduler.running
        self._verifier = TierLine("verifier")
        self._drafter = TierLine("drafter", alive=drafter is not None)
        self._last_id = 0

    @property
    def has_work(self) -> bool:
        """Something is left to plan or to absorb."""
        tiers = (self._verifier, self._drafter)
        return bool(self.num_waiting or self._running or any(tier.tick or tier.releases for tier in tiers))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            SettingError: it asks for what is not here, or context, vocabulary or token budget can never hold it.
        """
        if sequence.draft.source == "neural" and self._drafter_info is None:
            raise SettingError("draft.source: 'neural' needs a drafter, and none is loaded")
        self._sources.check(sequence.draft)
        info = self._drafter_info
        if sequence.draft.min_survival and info is not None and not info.predicts_survival:
            raise SettingError("draft.min_survival: the drafter has no trained verification head; set it to 0")
        size = self.limits.vocab_size
        if size and not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < size:
            raise SettingError(f"prompt: holds a token id outside of the vocabulary (0 to {size - 1})")
        end = OutputEnd(sequence.sampling, self._eos_ids, self._decode if sequence.wants_text else None)
        self._scheduler.add(sequence)
        sequence.end = end

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence at once and frees its places. Unknown ids are ignored: it may have ended by itself."""
        slot = self._running.get(sequence_id)
        if slot is not None:
            self._finish(slot, "abort")
        elif (sequence := self._scheduler.withdraw(sequence_id)) is not None:
            sequence.finish_reason = "abort"

    def tier_lost(self, name: TierName) -> None:
        """A tier is gone with all it held. Without drafter the engine decodes plainly; without verifier it waits."""
        tier = self._tier(name)
        tier.lose()
        for slot in self._running.values():
            asking = slot.source == "neural" and slot.draft is None
            if tier is self._drafter:
                slot.rows.lose()
                if asking:
                    slot.decide("none", [])
            else:
                slot.held = 0
                if not asking:
                    slot.reopen()

    def tier_restored(self, name: TierName) -> None:
        """An empty tier stands in for the lost one: the verifier is replayed to, the drafter starts cold."""
        self._tier(name).alive = True

    def plan(self) -> list[TierMessage]:
        """The messages that can go out now; at most one is out per tier."""
        for slot in self._scheduler.admit():
            self._sources.open(slot)
        messages = []
        for group in sorted(self._scheduler.groups, key=lambda g: g.last_tick):
            if group.members and not group.busy:
                messages.extend(self._plan_group(group))
        if not self._running:
            lines = (self._verifier, self._drafter)
            messages.extend(line.send(self._next_id(), []) for line in lines if line.idle and line.releases)
        return messages

    def absorb(self, reply: TierReply) -> list[Event]:
        """Commits what a tier answered. Replies to messages that are not out any more are dropped."""
        tier = self._tier(reply.tier)
        if reply.tick != tier.tick:
            return []
        tier.settle()
        is_verifier = tier is self._verifier
        self.stats.verifier_calls += bool(is_verifier and reply.items)
        slots = [self._running.get(item.sequence_id) for item in reply.items]
        self._sources.note_seconds(reply, slots)
        seconds = reply.seconds / max(1, len(reply.items))
        events: list[Event] = []
        next_row = 0
        for item, slot in zip(reply.items, slots, strict=True):
            first_row = next_row
            if isinstance(item, Verified | Prefilled):
                next_row += item.num_features
            if slot is None or slot.round_id != item.round_id:
                continue
            slot.round_id = 0
            stats = slot.sequence.stats
            if is_verifier:
                stats.verifier_calls += 1
                stats.verifier_seconds += seconds
            else:
                stats.drafter_seconds += seconds
            if next_row > first_row:
                assert reply.features is not None
                slot.rows.add(slot.held, reply.features[first_row:next_row])
            match item:
                case Verified():
                    events.append(self._commit(slot, item))
                case Prefilled():
                    slot.held = item.held
                case Proposed():
                    slot.rows.confirm()
                    limit = self._draft_limit(slot) if slot.up_to_date else 0
                    slot.decide("neural", item.draft_ids[:limit])
                case UnknownPrefix():
                    self._replay(slot, item, tier)
                case OutOfPages():
                    self._make_room(slot, tier)
        return events

    def _plan_group(self, group: Group) -> list[TierMessage]:
        members = group.members
        self._choose_sources([slot for slot in members.values() if slot.source is None], len(members))
        asking = [slot for slot in members.values() if slot.draft is None]
        if asking:
            return [self._propose(asking, group)] if self._drafter.idle else []
        if not self._verifier.idle:
            return []
        for slot in self._scheduler.reserve(group):
            self._release(slot)
        items = self._verify(group)
        return [self._verifier.send(self._next_id(), items, group)] if items else []

    def _choose_sources(self, slots: list[Slot], batch: int) -> None:
        """Who drafts this round: a suffix cache (it has drafted then), the neural drafter (asked next), or nobody."""
        asking = []
        for slot in slots:
            limit = self._draft_limit(slot)
            if not slot.up_to_date or limit < 1:
                slot.decide("none", [])
            else:
                ready = self._features_wanted(slot) and slot.drafter_ready
                asking.append((slot, limit, self._neural_limit(slot) if ready else 0))
        self._sources.choose(asking, batch)

    def _neural_limit(self, slot: Slot) -> int:
        assert self._drafter_info is not None
        most = self._drafter_info.max_draft_tokens
        return min(most, self._draft_limit(slot), slot.sequence.draft.max_tokens)

    def _draft_limit(self, slot: Slot) -> int:
        """Draft tokens that the limits leave, the target's own choice behind them counted."""
        return min(self.limits.max_draft_tokens, self._room(slot.sequence) - 1)

    def _room(self, sequence: Sequence) -> int:
        return min(sequence.room, self.limits.max_context - len(sequence))

    def _propose(self, asking: list[Slot], group: Group) -> TierMessage:
        pieces = [piece for slot in asking for piece in slot.rows.waiting]
        items: list[Item] = [slot.propose(self._next_id(), self._neural_limit(slot)) for slot in asking]
        features = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self._drafter.send(self._next_id(), items, group, features)

    def _verify(self, group: Group) -> list[Item]:
        """Decoding rows first, then prompts, the earliest admitted first, in what is left of the tick's rows."""
        items: list[Item] = []
        behind: list[Slot] = []
        rows_left = self.limits.prefill_tokens
        for slot in group.members.values():
            if slot.up_to_date:
                items.append(slot.verify(self._next_id(), self._features_wanted(slot)))
                rows_left -= 1 + len(slot.draft or ())
            else:
                behind.append(slot)
        rows_left = max(rows_left, self.limits.page_tokens)
        for slot in behind:
            missing = len(slot.sequence) - slot.held
            if missing <= rows_left:
                items.append(slot.verify(self._next_id(), self._features_wanted(slot)))
            elif rows_left:
                new = slot.held + rows_left > slot.rows.end
                items.append(slot.prefill(self._next_id(), rows_left, new and self._features_wanted(slot)))
            rows_left -= min(missing, rows_left)
        return items

    def _features_wanted(self, slot: Slot) -> bool:
        return slot.wants_features and self._drafter.alive

    def _commit(self, slot: Slot, item: Verified) -> Event:
        """Takes the accepted drafts and the target's choice, up to where the output ends."""
        sequence, draft, source = slot.sequence, slot.draft or [], slot.source or "none"
        assert sequence.end is not None
        if not 0 <= item.accepted <= len(draft):
            raise ValueError(f"verifier: accepted {item.accepted} of {len(draft)} drafts of sequence {sequence.id!r}")
        block = [*draft[: item.accepted], item.next_token]
        cut = sequence.end.take(block, self._room(sequence))
        token_ids = block[: cut.num_tokens]
        accepted = min(item.accepted, cut.num_consumed)
        exceptions = [(index, regret) for index, regret in item.exceptions if index < accepted]
        sequence.ledger.debit(regret for _, regret in exceptions)
        if slot.up_to_date:
            cut_in_draft = cut.num_consumed <= item.accepted
            sequence.stats.record_round(source, len(draft), accepted, len(token_ids), cut_in_draft, exceptions)
            self._sources.note_round(slot, source, accepted)
        else:
            source = "prefill"
            sequence.stats.tokens_by_source[source] += len(token_ids)
        slot.held = len(sequence) + item.accepted
        sequence.commit(token_ids)
        if cut.finish_reason is not None:
            self._sources.note_output(slot)
            self._finish(slot, cut.finish_reason)
        else:
            slot.reopen()
            if slot.suffix is not None:
                slot.suffix.extend(token_ids)
        return Event(sequence.id, token_ids, cut.text, cut.finish_reason, source, min(accepted, len(token_ids)))

    def _replay(self, slot: Slot, item: UnknownPrefix, tier: TierLine) -> None:
        if tier is self._verifier:
            slot.held = item.held if item.held < slot.held else 0
            slot.reopen()
        elif slot.rows.held == slot.rows.origin:
            slot.decide("none", [])
        else:
            slot.rows.lose()

    def _make_room(self, slot: Slot, tier: TierLine) -> None:
        if tier is self._drafter:
            slot.rows.lose()
            tier.releases.append(slot.sequence.id)
            slot.decide("none", [])
            return
        if len(self._running) == 1:
            raise SettingError("decoding.token_budget: the verifier's cache is smaller than the engine was told")
        self._release(self._scheduler.preempt_newest())

    def _finish(self, slot: Slot, reason: str) -> None:
        sequence = slot.sequence
        sequence.finish_reason = reason
        self._scheduler.remove(slot)
        self._release(slot)
        calls = self.stats.verifier_calls
        self.stats.merge(sequence.stats)
        self.stats.verifier_calls = calls

    def _release(self, slot: Slot) -> None:
        if self._verifier.alive:
            self._verifier.releases.append(slot.sequence.id)
        if self._drafter.alive and slot.wants_features:
            self._drafter.releases.append(slot.sequence.id)

    def _tier(self, name: TierName) -> TierLine:
        return self._verifier if name == "verifier" else self._drafter

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id
