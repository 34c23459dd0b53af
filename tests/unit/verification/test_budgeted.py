"""The worked examples and properties of budgeted verification (arXiv 2608.03447), against a plain scan."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.errors import SettingError
from tierspec.verification import Ledger, VerificationPolicy, budgeted_prefix, greedy_prefix

EVERYTHING = math.inf


def scan(
    draft: list[int], top: list[int], regret: list[float], *, gate: float, cap: int, remaining: float, strictly: bool
) -> tuple[int, float]:
    """The rule as it is written down: left to right, up to the first mismatch that a limit refuses."""
    spent, used = 0.0, 0
    for index, (mine, theirs, gap) in enumerate(zip(draft, top, regret, strict=True)):
        if mine == theirs:
            continue
        affordable = spent + gap <= remaining and (not strictly or remaining - spent > 0)
        if gap > gate * (len(draft) - index) or not affordable or used + 1 > cap or not math.isfinite(gap):
            return index, spent
        spent, used = spent + gap, used + 1
    return len(draft), spent


def block(regrets: dict[int, float], length: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block with mismatches at the 1-based positions of `regrets`, exact elsewhere."""
    top = torch.arange(1, length + 1)
    draft, regret = top.clone(), torch.zeros(length, dtype=torch.float64)
    for position, gap in regrets.items():
        draft[position - 1] += 100
        regret[position - 1] = gap
    return draft, top, regret


@pytest.mark.parametrize(
    ("regrets", "remaining", "accepted", "spent"),
    [
        ({2: 1.25, 5: 0.5, 7: 0.125}, 3.0, 6, 1.75),  # the third exception is over the cap
        ({1: 1.5}, 1.25, 0, 0.0),  # over the budget
        ({3: 1.25}, 1.25, 7, 1.25),  # both limits met with equality
        ({2: 0.0}, 0.0, 7, 0.0),  # a tie costs nothing
    ],
)
def test_worked_blocks(regrets, remaining, accepted, spent):
    got = budgeted_prefix(*block(regrets), gate=0.25, cap=2, remaining=remaining)
    assert (int(got[0]), float(got[1])) == (accepted, spent)


def test_a_tie_needs_budget_where_asked():
    got = budgeted_prefix(*block({2: 0.0}), gate=0.25, cap=2, remaining=0.0, ties_need_budget=True)
    assert int(got[0]) == 1


def decide(policy: VerificationPolicy, ledger: Ledger, draft, top, top_logits, draft_logits) -> int:
    """One block under a request's policy and ledger."""
    allowance = policy.allowance(ledger, 0, len(draft), ())
    ids = torch.tensor(draft, dtype=torch.int64), torch.tensor(top, dtype=torch.int64)
    if allowance is None:
        return int(greedy_prefix(*ids))
    gap = (torch.tensor(top_logits).double() - torch.tensor(draft_logits).double()).clamp_min(0)
    limits = {"gate": allowance.gate, "cap": allowance.cap, "remaining": allowance.remaining}
    accepted, _ = budgeted_prefix(*ids, gap, **limits, ties_need_budget=allowance.ties_need_budget)
    kept = int(accepted)
    ledger.debit(float(gap[i]) for i in range(kept) if draft[i] != top[i])
    return kept


def budgeted(budget: float, gate: float, cap: int, variant: str = "core") -> VerificationPolicy:
    return VerificationPolicy("budgeted", budget, 0.0, gate, cap, variant)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft", "top", "top_logits", "draft_logits", "limits", "accepted", "spent"),
    [
        ([1, 9, 3], [1, 2, 3], [5, 5, 5], [5, 4.9, 5], (0, 1, 2), 1, 0.0),
        ([9, 2, 8], [1, 2, 3], [5, 5, 5], [4.8, 5, 4.9], (1, 0.25, 1), 2, 0.2),
        ([9, 2], [1, 2], [5, 5], [4, 5], (1, 0.01, 2), 0, 0.0),
        ([2], [1], [5], [5], (0, 1, 2), 0, 0.0),
        ([9, 11, 13], [10, 11, 12], [5, 4, 3], [4.8, 4, 2], (8, 0.25, 2), 2, 0.2),
        ([9], [1], [5], [5], (1, 0, 2), 0, 0.0),
        ([1, 2, 9, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [5, 5, 4.9, 5, 5], (0, 1e6, 5, "tensor"), 2, 0.0),
        ([9, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [5.0] * 5, (0, 0, 5, "tensor"), 0, 0.0),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [5, 5, 4.75, 5, 5], (1, 1, 5, "tensor"), 5, 0.0),
        ([9, 2, 8, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [4.75, 5, 5, 5, 5], (0.25, 10, 2, "tensor"), 2, 0.25),
        ([9, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [4, 5, 5, 5, 5], (10, 0.01, 5, "tensor"), 0, 0.0),
        ([9, 2, 8, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [4.9, 5, 4.9, 5, 5], (10, 10, 1, "tensor"), 2, 0.1),
    ],
)
def test_published_cases(draft, top, top_logits, draft_logits, limits, accepted, spent):
    ledger = Ledger()
    assert decide(budgeted(*limits), ledger, draft, top, top_logits, draft_logits) == accepted
    assert ledger.spent == pytest.approx(spent, abs=1e-6)


def test_the_ledger_goes_through_a_request_and_not_beyond_it():
    policy, first, second = budgeted(0.3, 1, 1), Ledger(), Ledger()
    single = ([2], [1], [5], [4.8])
    assert [decide(policy, first, *single) for _ in range(2)] == [1, 0]
    assert (first.spent, first.exceptions) == (pytest.approx(0.2), 1)
    assert decide(policy, second, *single) == 1
    tensor, ledger = budgeted(0.25, 1, 1, "tensor"), Ledger()
    assert decide(tensor, ledger, [9, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [4.75, 5, 5, 5, 5]) == 5
    assert decide(tensor, ledger, [1, 9, 3, 4, 5], [1, 2, 3, 4, 5], [5.0] * 5, [5.0] * 5) == 1


LIMITS = st.tuples(
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 2.0]), st.integers(0, 5), st.sampled_from([0.0, 0.125, 0.5, 1.0, 4.0])
)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31), rows=st.integers(1, 5), depth=st.integers(0, 8), limits=LIMITS, strictly=st.booleans()
)
def test_rows_equal_the_scan_whatever_shares_the_batch(seed, rows, depth, limits, strictly):
    generator = torch.Generator().manual_seed(seed)
    top = torch.randint(0, 4, (rows, depth), generator=generator)
    draft = torch.where(torch.rand((rows, depth), generator=generator) < 0.55, top, (top + 1) % 4)
    regret = torch.randint(0, 12, (rows, depth), generator=generator).double() / 8
    regret[torch.rand((rows, depth), generator=generator) < 0.05] = math.nan
    regret[torch.rand((rows, depth), generator=generator) < 0.05] = math.inf
    lengths = torch.randint(0, depth + 1, (rows,), generator=generator)
    gate, cap, remaining = limits
    remaining_B = torch.rand(rows, generator=generator).mul(8).round().double() / 8 + remaining
    cap_B = torch.tensor([cap if row % 2 == 0 else 0 for row in range(rows)])
    accepted, spent = budgeted_prefix(
        draft, top, regret, gate=gate, cap=cap_B, remaining=remaining_B, length=lengths, ties_need_budget=strictly
    )
    assert accepted.dtype == torch.int64 and spent.dtype == torch.float64
    for row, length in enumerate(lengths.tolist()):
        parts = (draft[row, :length].tolist(), top[row, :length].tolist(), regret[row, :length].tolist())
        left = float(remaining_B[row])
        want = scan(*parts, gate=gate, cap=int(cap_B[row]), remaining=left, strictly=strictly)
        assert (int(accepted[row]), float(spent[row])) == pytest.approx(want)
        if row % 2:
            assert int(accepted[row]) == int(greedy_prefix(draft[row, :length], top[row, :length]))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**31), depth=st.integers(1, 8), limits=LIMITS, more=st.tuples(*[st.floats(0, 2)] * 2))
def test_more_room_never_keeps_less_and_strict_is_the_least(seed, depth, limits, more):
    generator = torch.Generator().manual_seed(seed)
    top = torch.randint(0, 4, (depth,), generator=generator)
    draft = torch.where(torch.rand(depth, generator=generator) < 0.5, top, (top + 1) % 4)
    regret = torch.rand(depth, generator=generator, dtype=torch.float64)
    gate, cap, remaining = limits
    least, spent = budgeted_prefix(draft, top, regret, gate=gate, cap=cap, remaining=remaining)
    assert int(least) >= int(greedy_prefix(draft, top))
    assert float(spent) <= remaining
    assert int((draft != top)[: int(least)].sum()) <= cap
    for gate_, cap_, remaining_ in (
        (gate + more[0], cap, remaining),
        (gate, cap + 1, remaining),
        (gate, cap, remaining + more[1]),
    ):
        assert int(budgeted_prefix(draft, top, regret, gate=gate_, cap=cap_, remaining=remaining_)[0]) >= int(least)


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(-1, 16), min_size=1, max_size=6), max_size=12),
    budget=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    cap=st.integers(0, 3),
    variant=st.sampled_from(["paper", "core", "tensor"]),
)
def test_a_request_never_spends_more_than_its_budget(blocks, budget, cap, variant):
    policy, ledger = VerificationPolicy("budgeted", budget, 0.0, 1.0, cap, variant), Ledger()
    for gaps in blocks:  # -1 is an exact match
        draft = [1 if gap >= 0 else 0 for gap in gaps]
        top_logits = [5.0] * len(gaps)
        decide(policy, ledger, draft, [0] * len(gaps), top_logits, [5.0 - max(gap, 0) / 16 for gap in gaps])
    assert ledger.spent <= budget + 1e-6
    assert ledger.exceptions <= cap * len(blocks)


def test_an_allowance_grows_with_the_output_where_asked():
    policy, ledger = VerificationPolicy("budgeted", 1.0, 0.5), Ledger(1.25)
    assert policy.allowance(ledger, 0, 3, ()).remaining == 0.0
    assert policy.allowance(ledger, 4, 3, ()).remaining == 1.75
    assert VerificationPolicy("budgeted", 0.0, 0.5).allowance(Ledger(), 4, 3, ()).remaining == 2.0


@pytest.mark.parametrize(
    "fields",
    [{"budget": 0.0}, {"cap": 0}, {"name": "strict"}, {"gate": 0.0, "variant": "core"}],
)
def test_what_allows_nothing_is_strict(fields):
    assert VerificationPolicy(**{"name": "budgeted"} | fields).allowance(Ledger(), 9, 5, (2,)) is None


def test_tokens_that_end_the_output_are_protected_unless_relaxed():
    assert VerificationPolicy("budgeted").allowance(Ledger(), 0, 5, (7, 2)).protected_ids == (2, 7)
    assert VerificationPolicy("budgeted", relax_stops=True).allowance(Ledger(), 0, 5, (7, 2)).protected_ids == ()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"name": "loose"}, "verification.policy: must be one of strict, budgeted"),
        ({"variant": "sglang"}, "verification.variant: must be one of paper, core, tensor"),
        ({"budget": -1.0}, "verification.budget: must be finite and at least 0, not -1.0"),
        ({"gate": math.nan}, "verification.gate"),
        ({"budget_per_token": math.inf}, "verification.budget_per_token"),
        ({"cap": -1}, "verification.cap"),
    ],
)
def test_mistakes_are_named(fields, line):
    with pytest.raises(SettingError, match=line):
        VerificationPolicy(**{"name": "budgeted"} | fields).validate()


def test_sampled_requests_have_no_budget():
    VerificationPolicy("strict").validate(0.7)
    with pytest.raises(SettingError, match=r"verification.policy: 'budgeted' is defined for greedy requests"):
        VerificationPolicy("budgeted").validate(0.7)
