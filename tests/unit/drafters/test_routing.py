"""The router's rules on plain numbers, and what it learns of costs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierspec.drafters.payoff import History
from tierspec.drafters.routing import AcceptedEstimate, Candidate, Choice, CostCurve, RoundCosts, RouterRule, route
from tierspec.drafters.routing.rules import STALE_ROUNDS
from tierspec.drafters.suffix import SuffixProposal


class Known:
    """An estimator that was told."""

    def __init__(self, value: float) -> None:
        self.value, self.asked = value, 0

    def estimate(self, candidates):
        self.asked += len(candidates)
        return [self.value] * len(candidates)


def candidate(length: int = 8, *, neural: int = 3, accepted: float = 1.0, match: int = 5, score: float = 4.0):
    proposal = SuffixProposal(list(range(length)), [0.5] * length, score if length else 0.0, match)
    return Candidate(proposal, [1, 2, 3], 2, 10, History(), AcceptedEstimate(start=accepted), neural)


def costs(verify: dict[int, float], draft: float = 0.2) -> RoundCosts:
    found = RoundCosts()
    for rows, seconds in verify.items():
        found.verify.record(rows, seconds)
    found.draft.record(1, draft)
    return found


FLAT = {1: 1.0, 64: 1.0}
STEEP = {1: 1.0, 2: 2.0, 4: 4.0, 16: 16.0}


@pytest.mark.parametrize(
    ("rule", "payoff", "expected"),
    [
        (RouterRule("match", match_length=5), 0, "suffix"),
        (RouterRule("match", match_length=6), 0, "neural"),
        (RouterRule("score", min_score=4.0), 0, "suffix"),
        (RouterRule("score", min_score=4.1), 0, "neural"),
        (RouterRule("first"), 0, "suffix"),
        (RouterRule("fixed", min_payoff=6.0), 6.0, "suffix"),
        (RouterRule("fixed", min_payoff=6.0), 5.9, "neural"),
    ],
)
def test_rules_and_their_thresholds(rule, payoff, expected):
    for neural, other in ((3, "neural"), (0, "none")):
        (choice,) = route(rule, [candidate(neural=neural)], costs=RoundCosts(), payoff=Known(payoff))
        assert choice.source == ("suffix" if expected == "suffix" else other)
        (empty,) = route(rule, [candidate(0, neural=neural)], costs=RoundCosts(), payoff=Known(payoff))
        assert empty.source == other


def test_a_draft_too_short_to_reach_the_threshold_is_not_asked_about():
    known = Known(9.0)
    choices = route(RouterRule("fixed"), [candidate(5), candidate(7)], costs=RoundCosts(), payoff=known)
    assert [choice.source for choice in choices] == ["neural", "suffix"] and known.asked == 1


@pytest.mark.parametrize(
    ("verify", "draft", "payoff", "accepted", "neural", "expected"),
    [
        (FLAT, 0.2, 5.0, 1.0, 3, Choice("suffix", 8)),
        (FLAT, 0.2, 0.5, 1.0, 3, Choice("neural")),
        (FLAT, 0.2, 0.8, 1.0, 3, Choice("suffix", 8)),  # (1 + 0.8) / 1 against (1 + 1) / 1.2
        (FLAT, 2.0, 0.0, 1.0, 3, Choice("suffix", 8)),  # costs nothing, promises nothing: a draft rather than none
        (STEEP, 0.2, 0.5, 1.0, 3, Choice("none")),  # the verifier is busy: neither pays
        (STEEP, 0.2, 0.5, 1.0, 0, Choice("none")),
        ({1: 1.0, 2: 1.0, 3: 1.0, 9: 9.0}, 0.2, 2.0, 0.0, 3, Choice("suffix", 2)),  # cut where rows get dear
    ],
)
def test_cost_takes_what_promises_most_tokens_per_second(verify, draft, payoff, accepted, neural, expected):
    asked = candidate(neural=neural, accepted=accepted)
    assert route(RouterRule("cost"), [asked], costs=costs(verify, draft), payoff=Known(payoff)) == [expected]


def test_cost_counts_the_rows_of_the_whole_tick():
    found = costs({1: 1.0, 8: 1.0, 64: 8.0})
    rule, asked = RouterRule("cost"), candidate(7, neural=0)
    assert route(rule, [asked], costs=found, payoff=Known(6.0), batch=1) == [Choice("suffix", 7)]
    (crowded,) = route(rule, [asked], costs=found, payoff=Known(0.1), batch=8)
    assert crowded == Choice("none")


def test_cost_before_anything_is_known_is_the_fixed_rule():
    rule = RouterRule("cost")
    assert route(rule, [candidate()], costs=RoundCosts(), payoff=Known(6.0)) == [Choice("suffix", 8)]
    assert route(rule, [candidate()], costs=RoundCosts(), payoff=Known(1.0)) == [Choice("neural")]


def test_a_neural_drafter_that_was_shut_out_gets_another_try():
    asked, found = candidate(accepted=0.0), costs(FLAT)
    rule, poor = RouterRule("cost"), Known(0.5)
    assert route(rule, [asked], costs=found, payoff=poor)[0].source == "suffix"
    for _ in range(STALE_ROUNDS):
        asked.neural.record(False, 0)
    assert route(rule, [asked], costs=found, payoff=poor)[0].source == "neural"
    assert route(rule, [asked], costs=found, payoff=Known(7.0))[0].source == "suffix"


def test_an_estimate_moves_with_the_rounds_and_tells_its_parent():
    parent = AcceptedEstimate(weight=0.02)
    child = AcceptedEstimate(parent)
    for _ in range(200):
        child.record(True, 3)
        child.record(False, 9)
    assert child.value == pytest.approx(3.0, abs=1e-3)
    assert 2.5 < parent.value < 3.0 and AcceptedEstimate(parent).value == parent.value


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 1.0)), min_size=1, max_size=30))
def test_a_cost_curve_never_falls(measured):
    curve = CostCurve()
    for size, seconds in measured:
        curve.record(size, seconds)
    values = [curve.seconds(size) for size in range(1, 700)]
    assert all(a <= b + 1e-12 for a, b in pairwise(values)) and values[0] > 0


def test_a_size_that_was_never_tried_is_tried():
    curve = CostCurve()
    curve.record(4, 1.0)
    assert curve.seconds(33) == curve.seconds(1) == 1.0
    curve.record(33, 5.0)
    assert curve.seconds(33) == 5.0


def test_a_slow_first_measurement_is_forgotten():
    curve = CostCurve()
    curve.record(4, 9.0)
    curve.record(4, 1.0)
    assert curve.seconds(4) == 1.0
