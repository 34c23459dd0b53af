"""Whatever happens on the way, a sequence's text is that of plain autoregressive decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.toy_tiers import PIECES, ToyDrafter, ToyModel, ToyVerifier, decode
from tierspec.config import SuffixSettings
from tierspec.decoding import (
    DrafterInfo,
    DraftOptions,
    DraftSources,
    Engine,
    EngineLimits,
    SamplingParams,
    Sequence,
    SynchronousDriver,
)
from tierspec.drafters.routing import RouterRule
from tierspec.drafters.suffix import SharedSuffixCache
from tierspec.errors import SettingError

MODEL = ToyModel()
PAGE = 4
MAX_CONTEXT = 48
DRAFTER_TOKENS = 4
SOURCES = ("suffix", "neural", "none")
ROUTERS = ("match", "score", "first", "fixed", "cost")


def limits(**changes):
    values = {
        "max_running": 4,
        "token_budget": 16 * PAGE,
        "prefill_tokens": 8,
        "max_draft_tokens": 6,
        "max_context": MAX_CONTEXT,
        "vocab_size": len(PIECES),
        "page_tokens": PAGE,
    }
    return EngineLimits(**{**values, **changes})


class SomePayoff:
    """Estimates that are right now and then."""

    def estimate(self, candidates):
        return [(len(c.token_ids) * 7) % (len(c.proposal.tokens) + 1) for c in candidates]


@dataclass
class House:
    """An engine and toy tiers, and what came out of it."""

    limits: EngineLimits
    with_drafter: bool = True
    sequences: dict[str, Sequence] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self):
        info = DrafterInfo("toy", DRAFTER_TOKENS) if self.with_drafter else None
        sources = DraftSources(SomePayoff(), SharedSuffixCache(40, max_depth=8))
        self.engine = Engine(self.limits, drafter=info, sources=sources, decode=decode, eos_ids=[0])
        self.tiers = {"verifier": self.new_tier("verifier"), "drafter": self.new_tier("drafter")}

    def new_tier(self, name):
        if name == "drafter":
            return ToyDrafter(MODEL, self.sequences, max_draft_tokens=DRAFTER_TOKENS)
        return ToyVerifier(MODEL, pages=self.limits.pages(self.limits.token_budget), page_tokens=PAGE)

    def add(self, sequence):
        self.engine.add(sequence)
        self.sequences[sequence.id] = sequence
        self.texts[sequence.id] = ""
        self.tokens[sequence.id] = []

    def take(self, events):
        for event in events:
            self.texts[event.sequence_id] += event.text_delta or ""
            self.tokens[event.sequence_id] += event.token_ids
            assert event.accepted <= len(event.token_ids)
            assert (event.finish_reason is None) == (self.sequences[event.sequence_id].finish_reason is None)

    def run(self):
        for event in SynchronousDriver(self.engine, self.tiers).run():
            self.take([event])

    def check(self):
        """All is decoded, released and accounted for."""
        assert not self.engine.has_work
        assert not self.tiers["verifier"].held and not self.tiers["drafter"].held
        for sequence in self.sequences.values():
            check_sequence(sequence, self.tokens[sequence.id], self.texts[sequence.id], self.limits.max_context)


def check_sequence(sequence, tokens, text, max_context):
    prompt = sequence.token_ids[: sequence.prompt_length]
    output, plain_text, reason = MODEL.decode_plainly(prompt, sequence.sampling, max_context)
    assert tokens == sequence.output_ids
    stats = sequence.stats
    assert sum(stats.tokens_by_source.values()) == len(tokens)
    assert sum(stats.rounds_by_source.values()) == stats.rounds <= stats.verifier_calls
    assert stats.accepted <= stats.drafted and stats.accepted == sum(stats.accepted_at)
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert stats.verifier_seconds >= 0 and stats.drafter_seconds >= 0
    if sequence.finish_reason == "abort":
        assert output[: len(tokens)] == tokens and plain_text.startswith(text)
        return
    assert (sequence.output_ids, sequence.finish_reason) == (output, reason)
    assert text == plain_text
    if reason == "length":
        assert len(tokens) == stats.rounds + stats.accepted + stats.tokens_by_source["prefill"]
        assert stats.tokens_by_source["target"] == stats.rounds


def random_prompt(rng):
    return [rng.randrange(len(PIECES)) for _ in range(rng.randint(1, 20))]


def random_sampling(rng):
    return SamplingParams(
        max_new_tokens=rng.randint(1, 24),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(4),
        stream=rng.randrange(2),
        stop=rng.choice([(), (), (), ("abab",), ("é", "b a"), ("😀", "zz"), ("bbb", "bbab")]),
        stop_token_ids=rng.choice([(), (), (), (5,)]),
        ignore_eos=rng.random() < 0.7,
    )


def random_draft(rng):
    return DraftOptions(
        source=rng.choice(["auto", "auto", "suffix", "neural", "neural", "none"]),
        max_tokens=rng.randint(1, 5),
        rule=RouterRule(rng.choice(ROUTERS), rng.randint(1, 3), rng.choice([0.5, 2.0]), rng.choice([0.5, 2.0])),
        suffix=SuffixSettings(factor=rng.choice([1.0, 4.0]), max_tokens=rng.randint(1, 8)),
    )


def sequence(name, prompt_ids, sampling=None, draft=None):
    return Sequence(name, prompt_ids, sampling or SamplingParams(), draft)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_schedule_gives_the_text_of_plain_decoding(seed):
    """Joins, leaves, chunks, preemption, forgetful and dying tiers, late and repeated replies, in any order."""
    rng = random.Random(seed)
    house = House(
        limits(
            max_running=rng.randint(1, 4),
            token_budget=PAGE * rng.randint(12, 18),
            prefill_tokens=rng.randint(1, 16),
            max_draft_tokens=rng.randint(1, 6),
            groups=rng.randint(1, 2),
        )
    )
    engine = house.engine
    replies, old, down = {}, [], set()
    weights = {"add": 10, "plan": 40, "reply": 40, "stale": 5, "forget": 2, "abort": 1, "lose": 1, "restore": 10}
    for step in range(200):
        (action,) = rng.choices(list(weights), weights.values())
        name = rng.choice(["verifier", "drafter"])
        if action == "add" and len(house.sequences) < 6:
            house.add(sequence(f"s{step}", random_prompt(rng), random_sampling(rng), random_draft(rng)))
        elif action == "plan":
            for message in engine.plan():
                assert message.tier not in replies and message.tier not in down
                replies[message.tier] = house.tiers[message.tier].handle(message)
        elif action == "reply" and name in replies:
            reply = replies.pop(name)
            house.take(engine.absorb(reply))
            old.append(reply)
        elif action == "stale" and old:
            assert engine.absorb(rng.choice(old)) == []
        elif action == "forget" and house.tiers[name].held:
            del house.tiers[name].held[rng.choice(sorted(house.tiers[name].held))]
        elif action == "abort" and house.sequences:
            engine.abort(rng.choice(sorted(house.sequences)))
        elif action == "lose" and name not in down:
            engine.tier_lost(name)
            down.add(name)
            house.tiers[name] = house.new_tier(name)
            if name in replies:
                old.append(replies.pop(name))
        elif action == "restore" and name in down:
            engine.tier_restored(name)
            down.remove(name)
    for name in down:
        engine.tier_restored(name)
    for reply in replies.values():
        house.take(engine.absorb(reply))
    house.run()
    house.check()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_every_draft_source_and_batch_gives_the_same(seed):
    rng = random.Random(seed)
    prompt_ids, sampling = random_prompt(rng), random_sampling(rng)
    outputs = set()
    for source, router in [*(("auto", router) for router in ROUTERS), *((s, "match") for s in SOURCES)]:
        options = DraftOptions(source, rule=RouterRule(router, match_length=1))
        for copies in (1, 3):
            house = House(limits(token_budget=64 * PAGE))
            for copy in range(copies):
                house.add(sequence(f"s{copy}", prompt_ids, sampling, options))
            house.run()
            house.check()
            stats, verifier = house.engine.stats, house.tiers["verifier"]
            assert stats.verifier_calls == verifier.calls
            if all(s.finish_reason == "length" for s in house.sequences.values()):
                committed = sum(len(s) - 1 for s in house.sequences.values())
                assert verifier.rows == committed + stats.drafted - stats.accepted
            outputs |= {tuple(s.output_ids) for s in house.sequences.values()}
    assert len(outputs) == 1


def test_two_groups_keep_both_tiers_busy():
    house = House(limits(groups=2, max_running=4, token_budget=64 * PAGE))
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for index in range(4):
        house.add(sequence(f"s{index}", [1 + index, 2, 3], sampling, DraftOptions(source="neural")))
    groups: set[frozenset[str]] = set()
    both = 0
    out = []
    while house.engine.has_work:
        out.extend(house.engine.plan())
        members = [frozenset(item.sequence_id for item in message.items) for message in out]
        groups.update(m for m in members if len(m) == 2)
        both += len(out) == 2
        assert len(out) == len({m.tier for m in out})
        assert not frozenset.intersection(*members) or len(members) == 1
        house.take(house.engine.absorb(house.tiers[out[0].tier].handle(out.pop(0))))
    house.check()
    assert len(groups) == 2 and both > 5


def test_prompts_go_in_by_chunks_behind_the_decoding_rows():
    house = House(limits(prefill_tokens=8, max_context=96, token_budget=64 * PAGE), with_drafter=False)
    none = DraftOptions(source="none")
    house.add(sequence("short", [1, 2], SamplingParams(max_new_tokens=20, ignore_eos=True), none))
    for _ in range(3):
        step(house)
    house.add(sequence("long", [1, 2, 3, 4] * 8, SamplingParams(max_new_tokens=4), none))
    sizes = []
    while "long" in house.sequences and not house.tokens["long"]:
        (message,) = house.engine.plan()
        assert [item.sequence_id for item in message.items] == ["short", "long"]
        sizes.append([len(item.token_ids) for item in message.items])
        house.take(house.engine.absorb(house.tiers["verifier"].handle(message)))
    assert sizes == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 4]]
    house.run()
    house.check()


def step(house):
    for message in house.engine.plan():
        house.take(house.engine.absorb(house.tiers[message.tier].handle(message)))


def test_an_answer_to_an_earlier_sequence_of_the_same_name_is_dropped():
    house = House(limits(), with_drafter=False)
    house.add(sequence("s", [1, 2]))
    (message,) = house.engine.plan()
    house.engine.abort("s")
    house.add(sequence("s", [3, 4]))
    assert house.engine.plan() == []
    assert house.engine.absorb(house.tiers["verifier"].handle(message)) == []
    house.run()
    house.check()


def test_the_newest_sequence_gives_way_and_is_replayed():
    house = House(limits(token_budget=8 * PAGE, max_running=3), with_drafter=False)
    sampling = SamplingParams(max_new_tokens=22, ignore_eos=True)
    for index in range(5):
        house.add(sequence(f"s{index}", [1 + index] * 6, sampling, DraftOptions(source="none")))
    order: list[str] = []
    preempted = False
    while house.engine.has_work:
        running = house.engine.num_running
        step(house)
        done = [s.id for s in house.sequences.values() if s.finish_reason and s.id not in order]
        preempted |= house.engine.num_running < running - len(done)
        order += done
    house.check()
    assert preempted and order == ["s0", "s1", "s2", "s3", "s4"]


def test_a_dead_drafter_leaves_plain_decoding_and_comes_back_cold():
    house = House(limits(max_running=1, token_budget=32 * PAGE))
    house.add(sequence("s", [1, 2, 3], SamplingParams(max_new_tokens=40, ignore_eos=True), DraftOptions("neural")))
    while not (neural := house.sequences["s"].stats.rounds_by_source["neural"]):
        step(house)
    house.engine.tier_lost("drafter")
    house.tiers["drafter"] = drafter = house.new_tier("drafter")
    for _ in range(3):
        step(house)
    assert house.sequences["s"].stats.rounds_by_source["neural"] == neural
    house.engine.tier_restored("drafter")
    origin = len(house.sequences["s"]) - 1
    while not drafter.held:
        step(house)
    assert drafter.held["s"][0] == origin
    house.run()
    house.check()
    assert house.sequences["s"].stats.rounds_by_source["neural"] > neural


def test_a_forgetful_drafter_starts_cold_with_the_rows_that_wait():
    house = House(limits(max_running=1, token_budget=32 * PAGE))
    house.add(sequence("s", [1, 2, 3], SamplingParams(max_new_tokens=40, ignore_eos=True), DraftOptions("neural")))
    drafter = house.tiers["drafter"]
    while not drafter.held:
        step(house)
    _, held = drafter.held.pop("s")
    while not drafter.held:
        step(house)
    assert drafter.held["s"][0] == held > 0
    house.run()
    house.check()


def test_the_drafter_catches_up_on_all_rows_at_once():
    house = House(limits(max_running=1, max_context=200, token_budget=64 * PAGE))
    options = DraftOptions("auto", rule=RouterRule("match", match_length=2))
    house.add(sequence("s", [1, 2, 3, 4, 5, 1, 2], SamplingParams(max_new_tokens=60, ignore_eos=True), options))
    house.run()
    house.check()
    stats = house.sequences["s"].stats
    assert stats.rounds_by_source["suffix"] and stats.rounds_by_source["neural"]
    assert stats.tokens_by_source["neural"]


@pytest.mark.parametrize(
    ("prompt_ids", "sampling", "draft", "message"),
    [
        ([1] * MAX_CONTEXT, {}, {}, "prompt: 48 tokens leave no room"),
        ([1, len(PIECES)], {}, {}, "prompt: holds a token id outside of the vocabulary"),
        ([1] * 10, {"max_new_tokens": 30}, {}, "decoding.token_budget"),
        ([1], {}, {"source": "neural"}, "draft.source"),
    ],
)
def test_what_can_never_be_decoded_is_refused(prompt_ids, sampling, draft, message):
    house = House(limits(token_budget=8 * PAGE), with_drafter=False)
    with pytest.raises(SettingError, match=message):
        house.add(sequence("s", prompt_ids, SamplingParams(**{"max_new_tokens": 4, **sampling}), DraftOptions(**draft)))
    assert not house.engine.has_work


def test_stop_strings_need_a_tokenizer():
    engine = Engine(limits())
    with pytest.raises(SettingError, match=r"^stop: "):
        engine.add(sequence("s", [1], SamplingParams(stop=("a",))))


def test_an_id_is_used_once():
    house = House(limits())
    house.add(sequence("s", [1]))
    with pytest.raises(ValueError, match="'s' is being decoded"):
        house.engine.add(sequence("s", [1]))
