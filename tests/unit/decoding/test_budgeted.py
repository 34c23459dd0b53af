"""Budgeted verification through the engine: equal to a loop without caches, per row in mixed batches, debited right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.near_drafter import NearDrafter
from tierspec.decoding import DraftOptions, LocalCell, SamplingParams, generate
from tierspec.decoding.engine import Engine
from tierspec.models import Step
from tierspec.verification import VerificationPolicy

LOOSE = VerificationPolicy("budgeted", budget=6.0, gate=2.0, cap=2)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 9, 9, 9, 4], [100, 3], [8, 250, 17, 44, 44], [12], [31, 7, 31, 7], [2, 400], [77, 78, 79]]
DRAFT = DraftOptions("neural", max_tokens=4)


def naive(target, drafter, prompt, sampling, policy):
    """The rule over full recomputations: no cache, no batch, no tensors of more than one row."""
    output, spent, exceptions = [], 0.0, 0
    ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(target.eos_ids))
    while True:
        room = sampling.max_new_tokens - len(output)
        text = [*prompt, *output]
        depth = min(4, room - 1) if output else 0  # the first token comes with the prompt's features
        draft = drafter.draft(text[1:], depth) if depth else []
        logits = scores(target, [*text, *draft])[len(text) - 1 :]
        block, charged, used = [], [], 0
        for index, token in enumerate(draft):
            top = int(logits[index].argmax())
            gap = float(logits[index, top].double() - logits[index, token].double())
            if token != top:
                protected = not policy.relax_stops and (token in ends or top in ends)
                left = policy.budget + policy.budget_per_token * len(output) - spent
                affordable = sum(cost for _, cost in charged) + gap <= left and used < policy.cap
                if protected or gap > policy.gate * (len(draft) - index) or not affordable:
                    break
                charged.append((index, gap))
                used += 1
            block.append(token)
        block.append(int(logits[len(block)].argmax()))
        for index, token in enumerate(block):
            cost = dict(charged).get(index)
            if cost is not None:
                spent, exceptions = spent + cost, exceptions + 1
            if token in ends:
                return output, "stop", spent, exceptions
            output.append(token)
            if len(output) == sampling.max_new_tokens:
                return output, "length", spent, exceptions


def scores(target, token_ids):
    cache = target.decoder.new_cache(len(token_ids))
    hidden = target.decoder.forward([Step(cache.sequence(), token_ids)], cache)
    return target.decoder.logits(hidden.last)


@pytest.fixture(scope="module")
def drafter(tiny_target):
    return NearDrafter(tiny_target.decoder)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.sampled_from([0.25, 1.0, 4.0, 20.0]),
    per_token=st.sampled_from([0.0, 0.05]),
    gate=st.sampled_from([0.05, 0.5, 3.0]),
    cap=st.integers(1, 4),
    first=st.integers(0, 7),
    stops=st.lists(st.integers(0, 511), max_size=40, unique=True),
    relax=st.booleans(),
)
def test_output_and_ledger_are_those_of_a_loop_without_caches(
    tiny_target, drafter, budget, per_token, gate, cap, first, stops, relax
):
    policy = VerificationPolicy("budgeted", budget, per_token, gate, cap, relax_stops=relax)
    sampling = replace(GREEDY, stop_token_ids=tuple(stops))
    prompts = [PROMPTS[first], PROMPTS[(first + 3) % 8]]
    answers = generate(tiny_target, prompts, drafter=drafter, policy=policy, sampling=sampling, draft=DRAFT)
    for prompt, answer in zip(prompts, answers, strict=True):
        output, reason, spent, exceptions = naive(tiny_target, drafter, prompt, sampling, policy)
        assert (answer.token_ids, answer.finish_reason) == (output, reason)
        assert answer.stats.exceptions == exceptions
        assert answer.stats.deviation == pytest.approx(spent)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("nothing", [{"budget": 0.0}, {"cap": 0}, {"gate": 0.0, "variant": "core"}])
def test_a_policy_that_allows_nothing_is_strict(tiny_target, drafter, batch, nothing):
    arguments = {"drafter": drafter, "sampling": GREEDY, "draft": DRAFT, "max_running": batch}
    strict = generate(tiny_target, PROMPTS, **arguments)
    none = generate(tiny_target, PROMPTS, policy=replace(LOOSE, **nothing), **arguments)
    some = generate(tiny_target, PROMPTS, policy=LOOSE, **arguments)
    assert [a.token_ids for a in none] == [a.token_ids for a in strict] != [a.token_ids for a in some]
    assert sum(a.stats.exceptions for a in none) == 0 < sum(a.stats.exceptions for a in some)
    assert all(a.stats.deviation <= LOOSE.budget for a in some)
    assert sum(a.stats.accepted_strictly for a in some) < sum(a.stats.accepted for a in some)


def run(target, drafter, rows, *, token_budget=None, max_running=8):
    """Several requests, each with sampling and policy of its own, in one cell."""
    from tierspec.decoding.sequence import Sequence

    cell = LocalCell(target, drafter=drafter, max_running=max_running, token_budget=token_budget)
    sequences = [
        Sequence(str(index), prompt, sampling, DRAFT, policy, wants_text=False)
        for index, (prompt, sampling, policy) in enumerate(rows)
    ]
    for sequence in sequences:
        cell._engine.add(sequence)
    for _ in cell._driver.run():
        pass
    return sequences


def mixed_rows():
    strict = VerificationPolicy()
    hot = replace(GREEDY, temperature=1.0, seed=11)
    tight = replace(LOOSE, variant="tensor", budget=0.5)
    kinds = [(GREEDY, strict), (hot, strict), (GREEDY, LOOSE), (GREEDY, tight)]
    return [(prompt, *kinds[index % 4]) for index, prompt in enumerate(PROMPTS)]


def test_rows_of_a_mixed_batch_are_what_they_are_alone(tiny_target, drafter):
    together = run(tiny_target, drafter, mixed_rows())
    for row, sequence in zip(mixed_rows(), together, strict=True):
        (alone,) = run(tiny_target, drafter, [row])
        assert (sequence.output_ids, sequence.ledger) == (alone.output_ids, alone.ledger)
    assert sum(sequence.ledger.exceptions for sequence in together) > 0


def test_the_ledger_outlives_preemption_and_a_lost_verifier(tiny_target, drafter, monkeypatch):
    """A request that starts again behind its committed tokens goes on with what it has spent."""
    rows = [(prompt, replace(GREEDY, max_new_tokens=70), replace(LOOSE, budget=3.0)) for prompt in PROMPTS[:4]]
    preempted = []
    release = Engine._release
    monkeypatch.setattr(Engine, "_release", lambda self, slot: (preempted.append(slot), release(self, slot)))
    squeezed = run(tiny_target, drafter, rows, token_budget=256)
    assert len(preempted) > len(rows)
    for sequence in squeezed:
        assert sequence.ledger.spent == pytest.approx(sequence.stats.deviation)
        assert 0 < sequence.ledger.spent <= 3.0
        regrets = regrets_of(tiny_target, sequence)
        assert float(regrets.sum()) == pytest.approx(sequence.ledger.spent, abs=1e-3)
        assert int((regrets > 0).sum()) == sequence.ledger.exceptions


def regrets_of(target, sequence):
    """How far every output token is below the target's own, in the text that was written."""
    logits = scores(target, sequence.token_ids)[sequence.prompt_length - 1 : -1].double()
    written = torch.tensor(sequence.output_ids)
    return logits.amax(-1) - logits.gather(-1, written[:, None])[:, 0]


def test_sampled_rows_cannot_be_budgeted(tiny_target, drafter):
    with pytest.raises(Exception, match=r"verification.policy: 'budgeted' is defined for greedy requests"):
        generate(tiny_target, PROMPTS, policy=LOOSE, sampling=replace(GREEDY, temperature=0.5))
