"""Who runs: a queue, the running sequences in their groups, and the pages of the verifier's cache that they need."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tierspec.decoding.limits import EngineLimits
from tierspec.decoding.sequence import Sequence
from tierspec.decoding.slot import Slot
from tierspec.errors import SettingError


@dataclass(slots=True, eq=False)
class Group:
    """Sequences in lockstep, in the order of admission. `busy` while a tier works on them; `last_tick` was theirs."""

    members: dict[str, Slot] = field(default_factory=dict)
    busy: bool = False
    last_tick: int = 0


class Scheduler:
    """First come, first served. Where pages run out, the most recently admitted sequence goes back to the queue.

    So the oldest one always advances. A preempted sequence keeps its committed tokens and is replayed later.
    """

    def __init__(self, limits: EngineLimits, groups: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Slot] = {}  # in the order of admission
        self.groups = [Group() for _ in range(groups)]
        self._limits = limits
        self._total_pages = limits.pages(limits.token_budget)
        self._used_pages = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            SettingError: context or token budget can never hold it.
            ValueError: its id is in use.
        """
        limits = self._limits
        if sequence.id in self.running or any(other.id == sequence.id for other in self.waiting):
            raise ValueError(f"a sequence with id {sequence.id!r} is being decoded")
        if len(sequence) >= limits.max_context:
            raise SettingError(
                f"prompt: {len(sequence)} tokens leave no room for an answer in the context of {limits.max_context}"
            )
        longest = min(len(sequence) + sequence.room, limits.max_context)
        if limits.pages(longest) > self._total_pages:
            raise SettingError(
                f"decoding.token_budget: {limits.token_budget} tokens cannot hold a sequence that may grow to "
                f"{longest}; raise it or lower max_new_tokens"
            )
        self.waiting.append(sequence)

    def withdraw(self, sequence_id: str) -> Sequence | None:
        """Takes a sequence out of the queue; None if it is not there."""
        for sequence in self.waiting:
            if sequence.id == sequence_id:
                self.waiting.remove(sequence)
                return sequence
        return None

    def admit(self) -> list[Slot]:
        """Moves sequences from the queue to the smallest group while slots and pages for their tokens are free; returns
        their slots."""
        admitted: list[Slot] = []
        while self.waiting and len(self.running) < self._limits.max_running:
            pages = self._limits.pages(len(self.waiting[0]))
            if self._used_pages + pages > self._total_pages:
                break
            sequence = self.waiting.popleft()
            group = min(self.groups, key=lambda g: len(g.members))
            slot = Slot(sequence, group.members, pages)
            self._used_pages += pages
            self.running[sequence.id] = group.members[sequence.id] = slot
            admitted.append(slot)
        return admitted

    def remove(self, slot: Slot) -> None:
        """Takes a running sequence out."""
        del self.running[slot.sequence.id], slot.peers[slot.sequence.id]
        self._used_pages -= slot.pages

    def preempt_newest(self) -> Slot:
        """Puts the most recently admitted sequence back to the head of the queue and returns what was its slot."""
        slot = next(reversed(self.running.values()))
        self.remove(slot)
        self.waiting.appendleft(slot.sequence)
        return slot

    def reserve(self, group: Group) -> list[Slot]:
        """Reserves the pages of each member's committed and draft tokens; returns the slots preempted for that."""
        preempted: list[Slot] = []
        for slot in list(group.members.values()):
            if slot in preempted:
                continue
            pages = self._limits.pages(len(slot.sequence) + len(slot.draft or ()))
            while self._used_pages - slot.pages + pages > self._total_pages:
                preempted.append(self.preempt_newest())
                if preempted[-1] is slot:
                    break
            else:
                self._used_pages += pages - slot.pages
                slot.pages = pages
        return preempted
