"""A running sequence's places in the tiers. All of it may be lost: the engine rebuilds it from the sequence."""

from __future__ import annotations

import torch

from tierspec.decoding.messages import Prefill, Propose, Verify
from tierspec.decoding.sequence import Sequence
from tierspec.drafters.payoff import History
from tierspec.drafters.routing import AcceptedEstimate
from tierspec.drafters.suffix import SuffixCache


class DrafterRows:
    """The feature rows of one sequence: origin .. held - 1 are at the neural drafter, held .. end - 1 wait here.

    Waiting rows stay until the drafter has confirmed them, so a drafter that lost the earlier ones starts with them.
    """

    __slots__ = ("end", "held", "origin", "waiting")

    def __init__(self) -> None:
        self.origin = self.held = self.end = 0
        self.waiting: list[torch.Tensor] = []  # pieces, in order

    def add(self, base: int, rows: torch.Tensor) -> None:
        """Copies rows base, base + 1, ...; known ones are skipped, and a gap makes a cold start at `base`."""
        if base > self.end:
            self.origin = self.held = self.end = base
            self.waiting.clear()
        known = self.end - base
        if known < rows.shape[0]:
            self.waiting.append(rows[known:].clone())
            self.end = base + rows.shape[0]

    def confirm(self) -> None:
        """The drafter holds all rows."""
        self.held = self.end
        self.waiting = []

    def lose(self) -> None:
        """The drafter holds none: it starts with what waits, or with what comes next."""
        self.origin = self.held


class Slot:
    """One running sequence: what the verifier holds of it, the drafter's rows, its suffix cache, this round's draft.

    `draft` is None until the round's draft is there; `source` says who writes it (None: not decided). `round_id` is the
    item that a tier is answering, 0 if none is. `pages` are reserved for it; `peers` are its group, itself included.
    `history` and `accepted` are what the router knows of its past rounds.
    """

    __slots__ = (
        "accepted",
        "draft",
        "held",
        "history",
        "pages",
        "peers",
        "round_id",
        "rows",
        "sequence",
        "source",
        "suffix",
    )

    def __init__(self, sequence: Sequence, peers: dict[str, Slot], pages: int) -> None:
        self.sequence = sequence
        self.peers = peers
        self.pages = pages
        self.held = 0
        self.rows = DrafterRows()
        self.round_id = 0
        self.draft: list[int] | None = None
        self.source: str | None = None
        self.history = History()
        self.accepted: AcceptedEstimate | None = None  # set by the engine's draft sources
        self.suffix: SuffixCache | None = None
        if sequence.draft.source in ("auto", "suffix"):
            self.suffix = SuffixCache(sequence.draft.suffix.max_depth)
            self.suffix.extend(sequence.token_ids)

    @property
    def up_to_date(self) -> bool:
        """The verifier holds every committed token but the last."""
        return self.held == len(self.sequence.token_ids) - 1

    @property
    def wants_features(self) -> bool:
        return self.sequence.draft.source in ("auto", "neural")

    @property
    def drafter_ready(self) -> bool:
        """Every row that the drafter needs next is here or there."""
        return self.rows.held < self.rows.end == len(self.sequence.token_ids) - 1

    def decide(self, source: str, draft: list[int]) -> None:
        """Sets this round's draft; an empty one has no source."""
        self.source, self.draft = (source, draft) if draft else ("none", [])

    def reopen(self) -> None:
        """Forgets this round's draft."""
        self.source = self.draft = None

    def propose(self, round_id: int, limit: int) -> Propose:
        """Asks the drafter for at most `limit` tokens behind the rows that wait."""
        sequence, held = self.sequence, self.rows.held
        self.round_id = round_id
        return Propose(
            sequence_id=sequence.id,
            round_id=round_id,
            origin=self.rows.origin,
            base=held,
            prefix_hash=sequence.prefix_hash(held + 1),
            token_ids=sequence.token_ids[held + 1 :],
            max_tokens=limit,
            sampling=sequence.row_sampling,
            min_survival=sequence.draft.min_survival,
        )

    def verify(self, round_id: int, want_features: bool) -> Verify:
        """Sends all committed tokens that the verifier lacks, and this round's draft."""
        sequence, draft = self.sequence, self.draft or []
        self.round_id = round_id
        return Verify(
            sequence_id=sequence.id,
            round_id=round_id,
            base=self.held,
            prefix_hash=sequence.prefix_hash(self.held),
            token_ids=sequence.token_ids[self.held :] + draft,
            num_drafts=len(draft),
            sampling=sequence.row_sampling,
            allowance=sequence.allowance(len(draft)),
            want_features=want_features,
        )

    def prefill(self, round_id: int, rows: int, want_features: bool) -> Prefill:
        """Sends the next `rows` of the committed tokens that the verifier lacks."""
        sequence, held = self.sequence, self.held
        self.round_id = round_id
        return Prefill(
            sequence_id=sequence.id,
            round_id=round_id,
            base=held,
            prefix_hash=sequence.prefix_hash(held),
            token_ids=sequence.token_ids[held : held + rows],
            want_features=want_features,
        )
