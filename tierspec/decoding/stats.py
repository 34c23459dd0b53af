"""Decoding statistics, in the one meaning each term has in the project's glossary.

rounds                      verifications of a sequence that is up to date, drafted or not; the verification that ends
                            its prefill (or its replay) is not one
verifier_calls              forwards of the verifier, prefill chunks included
drafted, accepted           draft tokens verified, and those that stayed
accepted_draft_len          accepted / rounds
accept_len                  that + 1
acceptance_rate             accepted / drafted
exceptions                  accepted draft tokens that were not the target's choice (lossy policies)
deviation                   the regrets of these, added up, in nats
accepted_strictly           draft tokens that strict verification would have kept of the same drafts
per_position_acceptance[k]  P(draft position k accepted | the verifier reached it)

A block that is cut at its end (end of sequence, stop string) counts up to the cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(slots=True)
class DecodingStats:
    """Counts of one sequence, or of many added up. Seconds of a tier's call are shared evenly by its sequences.

    `rounds_by_source` has the keys none, suffix, neural; `tokens_by_source` says who wrote each committed token: a
    draft source, target (its choice behind the drafts), or prefill (its choice behind a prefill).
    """

    rounds: int = 0
    verifier_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_strictly: int = 0
    exceptions: int = 0
    deviation: float = 0.0
    rounds_by_source: Counter[str] = field(default_factory=Counter)
    tokens_by_source: Counter[str] = field(default_factory=Counter)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafter_seconds: float = 0.0
    verifier_seconds: float = 0.0

    @property
    def accepted_draft_len(self) -> float:
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def accept_len(self) -> float:
        return self.accepted_draft_len + 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def per_position_acceptance(self) -> list[float]:
        """One entry per draft position that a verifier ever reached."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def record_round(
        self,
        source: str,
        drafted: int,
        accepted: int,
        tokens: int,
        cut: bool,
        exceptions: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Counts one round: `tokens` committed tokens, of which the draft wrote the first `accepted` at most.

        `cut` says that the block ended inside the accepted drafts, so that no draft was rejected; `exceptions` are
        (index among the accepted, regret) of those that were not the target's choice.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_strictly += exceptions[0][0] if exceptions else accepted
        self.exceptions += len(exceptions)
        self.deviation += sum(regret for _, regret in exceptions)
        self.rounds_by_source[source] += 1
        from_draft = min(accepted, tokens)
        if from_draft:
            self.tokens_by_source[source] += from_draft
        if tokens > from_draft:
            self.tokens_by_source["target"] += tokens - from_draft
        reached = accepted if cut else min(accepted + 1, drafted)
        grow = reached - len(self.drafted_at)
        if grow > 0:
            self.drafted_at.extend([0] * grow)
            self.accepted_at.extend([0] * grow)
        for position in range(reached):
            self.drafted_at[position] += 1
        for position in range(accepted):
            self.accepted_at[position] += 1

    def merge(self, other: DecodingStats) -> None:
        """Adds the counts of `other`."""
        self.rounds += other.rounds
        self.verifier_calls += other.verifier_calls
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.accepted_strictly += other.accepted_strictly
        self.exceptions += other.exceptions
        self.deviation += other.deviation
        self.rounds_by_source.update(other.rounds_by_source)
        self.tokens_by_source.update(other.tokens_by_source)
        self.drafted_at = _sums(self.drafted_at, other.drafted_at)
        self.accepted_at = _sums(self.accepted_at, other.accepted_at)
        self.drafter_seconds += other.drafter_seconds
        self.verifier_seconds += other.verifier_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rounds": self.rounds,
            "verifier_calls": self.verifier_calls,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_strictly": self.accepted_strictly,
            "exceptions": self.exceptions,
            "deviation": self.deviation,
            "accepted_draft_len": self.accepted_draft_len,
            "accept_len": self.accept_len,
            "acceptance_rate": self.acceptance_rate,
            "per_position_acceptance": self.per_position_acceptance,
            "rounds_by_source": dict(self.rounds_by_source),
            "tokens_by_source": dict(self.tokens_by_source),
            "drafter_seconds": self.drafter_seconds,
            "verifier_seconds": self.verifier_seconds,
        }


def _sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
