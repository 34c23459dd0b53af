"""Which source drafts in a round, decided before the neural drafter is asked.

fixed  the cache where the predicted payoff reaches `min_payoff` (HVD, arXiv 2606.01019: 6)
cost   whatever promises most tokens per second by measured round times, plain decoding included (our choice)
match  the cache where at least `match_length` tokens matched (TensorRT-LLM's rule)
score  the cache where its score reaches `min_score` (SuffixDecoding's rule, arXiv 2411.04975)
first  the cache wherever it has a draft
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tierspec.drafters.payoff import History, PayoffPredictor, feature_row
from tierspec.drafters.routing.costs import AcceptedEstimate, RoundCosts
from tierspec.drafters.suffix import SuffixProposal

RouterName = Literal["match", "score", "first", "fixed", "cost"]
LEARNED = frozenset({"fixed", "cost"})
STALE_ROUNDS = 64
"""After so many rounds without it the neural drafter gets another try, lest a bad stretch shut it out (our choice)."""


@dataclass(frozen=True, slots=True)
class RouterRule:
    """A rule and its thresholds."""

    name: RouterName = "match"
    match_length: int = 4
    min_score: float = 3.0
    min_payoff: float = 6.0


@dataclass(slots=True)
class Candidate:
    """A sequence whose round is to be decided.

    `token_ids` are its committed tokens, the first `prompt_length` the prompt. `neural_tokens`: how many the neural
    drafter may draft, 0 where it cannot be asked.
    """

    proposal: SuffixProposal
    token_ids: Sequence[int]
    prompt_length: int
    max_new_tokens: int
    history: History
    neural: AcceptedEstimate
    neural_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`source`, and how many tokens of the cache's draft are verified."""

    source: Literal["suffix", "neural", "none"]
    max_tokens: int = 0


class PayoffEstimator(Protocol):
    """Says how many tokens of suffix drafts will be accepted."""

    def estimate(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """One per candidate; each has a draft."""


class LearnedPayoff:
    """The estimator that a trained predictor is."""

    def __init__(self, predictor: PayoffPredictor) -> None:
        self._predictor = predictor

    def estimate(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        rows = [
            feature_row(
                c.proposal,
                c.prompt_length,
                len(c.token_ids) - c.prompt_length,
                c.max_new_tokens,
                c.history.features(),
                self._predictor.classes,
            )
            for c in candidates
        ]
        estimates: list[float] = self._predictor.predict(rows).tolist()
        return estimates


def route(
    rule: RouterRule,
    candidates: Sequence[Candidate],
    *,
    costs: RoundCosts,
    payoff: PayoffEstimator | None = None,
    batch: int = 1,
) -> list[Choice]:
    """One choice per candidate. `payoff` is needed by the rules fixed and cost; `batch`: sequences of the tick.

    A draft shorter than `min_payoff` cannot reach it, so that the fixed rule does not ask about it.
    """
    least = rule.min_payoff if rule.name == "fixed" else 1
    asked = [c for c in candidates if rule.name in LEARNED and c.proposal.tokens and len(c.proposal.tokens) >= least]
    payoffs: dict[int, float] = {}
    if asked:
        assert payoff is not None
        payoffs = {id(c): value for c, value in zip(asked, payoff.estimate(asked), strict=True)}
    return [_choose(rule, c, payoffs.get(id(c), 0.0), costs, batch) for c in candidates]


def _choose(rule: RouterRule, candidate: Candidate, payoff: float, costs: RoundCosts, batch: int) -> Choice:
    proposal = candidate.proposal
    other = Choice("neural") if candidate.neural_tokens else Choice("none")
    if rule.name == "cost" and costs.verify.known:
        return _fastest(rule, candidate, payoff, costs, batch)
    pays = {
        "match": proposal.match_len >= rule.match_length,
        "score": proposal.score >= rule.min_score,
        "first": True,
    }.get(rule.name, payoff >= rule.min_payoff)
    return Choice("suffix", len(proposal.tokens)) if proposal.tokens and pays else other


def _fastest(rule: RouterRule, candidate: Candidate, payoff: float, costs: RoundCosts, batch: int) -> Choice:
    """Tokens per second of each choice, as if every sequence of the tick made the same; draft rather than not.

    A shorter draft is worth its share of the payoff: drafts of the cache mostly hold as a whole or not at all.
    """
    best, rate = Choice("none"), 1 / costs.verify.seconds(batch)
    if tokens := candidate.neural_tokens:
        stale = candidate.neural.rounds_since >= STALE_ROUNDS and payoff < rule.min_payoff
        if stale or not costs.draft.known:
            return Choice("neural")
        seconds = costs.verify.seconds(batch * (1 + tokens)) + costs.draft.seconds(batch)
        neural = (1 + min(candidate.neural.value, tokens)) / seconds
        if neural >= rate:
            best, rate = Choice("neural"), neural
    size = len(candidate.proposal.tokens)
    for length in [size, *(1 << bit for bit in range(size.bit_length()) if 1 << bit < size)] if size else []:
        suffix = (1 + payoff * length / size) / costs.verify.seconds(batch * (1 + length))
        if suffix > rate or (suffix == rate and best.source == "none"):
            best, rate = Choice("suffix", length), suffix
    return best
