"""Who drafts for the sequences of a tick: suffix caches propose, the router decides, what came of it is noted."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from tierspec.config import DraftSettings
from tierspec.decoding.messages import TierReply, Verified
from tierspec.decoding.sequence import DraftOptions
from tierspec.decoding.slot import Slot
from tierspec.drafters.payoff import PayoffPredictor
from tierspec.drafters.routing import (
    LEARNED,
    AcceptedEstimate,
    Candidate,
    LearnedPayoff,
    PayoffEstimator,
    RoundCosts,
    route,
)
from tierspec.drafters.suffix import SharedSuffixCache, SuffixLimits, SuffixProposal
from tierspec.errors import SettingError

_WEIGHT_OVER_ALL = 0.02  # of one neural round in the estimate that new sequences start from


@dataclass
class DraftSources:
    """`payoff` is needed by sequences whose router is learned. `shared` holds past outputs, for suffix drafts."""

    payoff: PayoffEstimator | None = None
    shared: SharedSuffixCache | None = None
    costs: RoundCosts = field(default_factory=RoundCosts)
    accepted: AcceptedEstimate = field(default_factory=lambda: AcceptedEstimate(weight=_WEIGHT_OVER_ALL))

    @classmethod
    def from_settings(cls, settings: DraftSettings, predictor: PayoffPredictor | None) -> DraftSources:
        """With a cache of past outputs where the settings ask for one."""
        tokens, depth = settings.shared_tokens, settings.suffix.max_depth
        payoff = LearnedPayoff(predictor) if predictor else None
        return cls(payoff, SharedSuffixCache(tokens, depth) if tokens else None)

    def check(self, draft: DraftOptions) -> None:
        """Raises SettingError where a sequence's router cannot decide."""
        if draft.source == "auto" and draft.rule.name in LEARNED and self.payoff is None:
            raise SettingError(f"draft.router: '{draft.rule.name}' needs a payoff predictor, and none is loaded")

    def open(self, slot: Slot) -> None:
        """For a sequence that begins to run."""
        slot.accepted = AcceptedEstimate(self.accepted)

    def choose(self, asking: Items[tuple[Slot, int, int]], batch: int) -> None:
        """Decides the round of each slot; with it come the draft tokens that its limits leave, and how many the neural
        drafter may make (0: it cannot be asked). `batch`: sequences of the tick."""
        undecided: dict[DraftOptions, list[tuple[Slot, Candidate]]] = {}
        for slot, limit, neural_tokens in asking:
            proposal = self._propose(slot, limit)
            options = slot.sequence.draft
            if options.source == "auto":
                candidate = _candidate(slot, proposal, neural_tokens)
                undecided.setdefault(options, []).append((slot, candidate))
            elif proposal.tokens:
                slot.decide("suffix", proposal.tokens)
            elif neural_tokens:
                slot.source = "neural"
            else:
                slot.decide("none", [])
        for options, entries in undecided.items():
            candidates = [candidate for _, candidate in entries]
            choices = route(options.rule, candidates, costs=self.costs, payoff=self.payoff, batch=batch)
            for (slot, candidate), choice in zip(entries, choices, strict=True):
                if choice.source == "neural":
                    slot.source = "neural"
                else:
                    slot.decide(choice.source, candidate.proposal.tokens[: choice.max_tokens])

    def note_round(self, slot: Slot, source: str, accepted: int) -> None:
        """What a round's draft was worth."""
        slot.history.record(source == "suffix", accepted)
        if slot.accepted is not None:
            slot.accepted.record(source == "neural", accepted)

    def note_seconds(self, reply: TierReply, slots: Items[Slot | None]) -> None:
        """What a tier took; `slots` are those of the reply's items. Prompts are left out: they are not rounds."""
        if not reply.items:
            return
        if reply.tier == "drafter":
            self.costs.draft.record(len(reply.items), reply.seconds)
        elif all(isinstance(item, Verified) for item in reply.items):
            rows = 0
            for slot in slots:
                if slot is None or not slot.up_to_date:
                    return
                rows += 1 + len(slot.draft or ())
            self.costs.verify.record(rows, reply.seconds)

    def note_output(self, slot: Slot) -> None:
        """A sequence has ended by itself: past outputs may be copied by those to come."""
        if self.shared is not None and slot.sequence.output_ids:
            self.shared.add(slot.sequence.id, slot.sequence.output_ids)

    def _propose(self, slot: Slot, limit: int) -> SuffixProposal:
        """The better of the sequence's own proposal and that of past outputs, its own on ties."""
        if slot.suffix is None:
            return SuffixProposal()
        s = slot.sequence.draft.suffix
        limits = SuffixLimits(min(limit, s.max_tokens), s.min_probability, s.factor, s.offset)
        own = slot.suffix.propose(limits.max_tokens, limits.min_probability, limits.factor, limits.offset)
        if self.shared is None:
            return own
        other = self.shared.propose(slot.sequence.token_ids[-s.max_depth :], limits)
        return other if other.score > own.score else own


def _candidate(slot: Slot, proposal: SuffixProposal, neural_tokens: int) -> Candidate:
    sequence = slot.sequence
    assert slot.accepted is not None
    return Candidate(
        proposal,
        sequence.token_ids,
        sequence.prompt_length,
        sequence.sampling.max_new_tokens,
        slot.history,
        slot.accepted,
        neural_tokens,
    )
