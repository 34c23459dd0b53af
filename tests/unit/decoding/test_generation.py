"""`generate` and `LocalCell` on a random decoder: real tiers, real caches, token identity with the naive loop."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.drafters import FAMILIES
from tests.support.target_drafters import write_untrained_drafter
from tierspec.config import SuffixSettings
from tierspec.decoding import DraftOptions, LocalCell, SamplingParams, generate
from tierspec.decoding.scheduler import Scheduler
from tierspec.drafters import UnknownPrefix, load_drafter
from tierspec.drafters.routing import RouterRule
from tierspec.errors import SettingError
from tierspec.models import Step
from tierspec.verification import VerificationPolicy, target_choice

LAYERS = (1, 3)


def plain(target, prompt_ids, sampling):
    """Autoregressive decoding with a cache of its own for every token."""
    row, output = sampling.row(), []
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(target.eos_ids))
    while len(output) < sampling.max_new_tokens:
        token_ids = [*prompt_ids, *output]
        token = choices(target, token_ids, row)[-1]
        if token in ends:
            return output, "stop"
        output.append(token)
    return output, "length"


def choices(target, token_ids, row):
    """The target's choice behind every prefix of `token_ids`."""
    count = len(token_ids)
    cache = target.decoder.new_cache(count)
    hidden = target.decoder.forward([Step(cache.sequence(), token_ids)], cache)
    keys = ([row.temperature], [row.top_k], [row.top_p], [row.seed], [row.stream])
    return target_choice(
        target.decoder.logits(hidden.last), *(key * count for key in keys), range(1, count + 1)
    ).tolist()


class WhisperingDrafter:
    """Knows the answer, errs in every third token, and checks that the rows it gets are the target's features."""

    family = "whispering"
    max_draft_tokens = 4
    predicts_survival = False
    feature_layers = LAYERS

    def __init__(self, target, answers):
        self.target, self.answers = target, answers

    def projection(self, features):
        return torch.cat([features[layer] for layer in LAYERS], -1).bfloat16()

    def new_state(self, token_budget):
        return WhisperingState(self)


class WhisperingState:
    def __init__(self, drafter):
        self.drafter = drafter
        self.tokens = {}
        self.features = {}

    def held(self, sequence_id):
        return len(self.features.get(sequence_id, ()))

    def release(self, sequence_id):
        self.tokens.pop(sequence_id, None)
        self.features.pop(sequence_id, None)

    def propose(self, requests):
        return [self._propose(request) for request in requests]

    def _propose(self, request):
        if request.base > self.held(request.sequence_id):
            raise UnknownPrefix([request.sequence_id])
        assert request.origin == 0 and request.features.shape[0] == len(request.token_ids) > 0
        rows = self.features.get(request.sequence_id, request.features[:0])[: request.base]
        tokens = self.tokens.get(request.sequence_id, [])[: request.base] + list(request.token_ids)
        self.tokens[request.sequence_id] = tokens
        self.features[request.sequence_id] = torch.cat((rows, request.features))
        (prompt, answer) = next(
            (p, a) for p, a in self.drafter.answers if [*p, *a][1 : len(tokens) + 1] == tokens and len(p) <= len(tokens)
        )
        self._check_features([*prompt, *answer][: len(tokens) + 1], request)
        ahead = [*prompt, *answer][len(tokens) + 1 :][: request.max_tokens]
        size = self.drafter.target.config.vocab_size
        return [(t + 1) % size if (len(tokens) + i) % 3 == 0 else t for i, t in enumerate(ahead)]

    def _check_features(self, token_ids, request):
        decoder = self.drafter.target.decoder
        cache = decoder.new_cache(len(token_ids))
        hidden = decoder.forward([Step(cache.sequence(), token_ids)], cache, features=LAYERS)
        expected = self.drafter.projection(hidden.features)[:-1]
        assert torch.equal(self.features[request.sequence_id], expected)


PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9], list(range(3, 128)), [11, 12] * 12, [400, 3, 77]]
SAMPLINGS = [
    SamplingParams(max_new_tokens=20, ignore_eos=True),
    SamplingParams(max_new_tokens=17, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=20, temperature=0.7, top_k=20, top_p=0.9, seed=-5, stream=1),
    SamplingParams(max_new_tokens=24, ignore_eos=True),
    SamplingParams(max_new_tokens=5, temperature=1.3, top_p=0.5, seed=2**60),
]


@pytest.fixture(scope="module")
def expected(tiny_target):
    return [plain(tiny_target, prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


@pytest.fixture(scope="module")
def drafter(tiny_target, expected):
    return WhisperingDrafter(tiny_target, [(p, output) for p, (output, _) in zip(PROMPTS, expected, strict=True)])


@pytest.mark.parametrize("source", ["none", "suffix", "neural", "auto"])
@pytest.mark.parametrize("max_running", [1, 5])
def test_the_answer_is_that_of_the_naive_loop(tiny_target, expected, drafter, source, max_running):
    options = DraftOptions(source, max_tokens=4, rule=RouterRule("match", 2), suffix=SuffixSettings(factor=4.0))
    neural = drafter if source in ("neural", "auto") else None
    answers = generate(tiny_target, PROMPTS, drafter=neural, sampling=SAMPLINGS, draft=options, max_running=max_running)
    assert [(a.token_ids, a.finish_reason) for a in answers] == expected
    for answer, sampling in zip(answers, SAMPLINGS, strict=True):
        assert answer.text == tiny_target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.seed == sampling.seed or sampling.seed is None
    accepted = sum(a.stats.accepted for a in answers)
    assert (accepted > 20) if neural else (accepted == 0 or source == "suffix")


@pytest.mark.parametrize("max_running", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_neural_drafter_changes_nothing(tiny_target, expected, tmp_path, max_running, family):
    directory = write_untrained_drafter(tmp_path / "drafter", tiny_target, draft_vocab_size=256, family=family)
    drafter = load_drafter(directory, tiny_target)
    answers = generate(tiny_target, PROMPTS, drafter=drafter, sampling=SAMPLINGS, max_running=max_running)
    assert [(a.token_ids, a.finish_reason) for a in answers] == expected
    assert sum(a.stats.drafted for a in answers) > sum(a.stats.accepted for a in answers)
    assert all(a.stats.rounds_by_source["neural"] for a in answers)
    with pytest.raises(SettingError, match=r"draft\.min_survival: the drafter has no trained verification head"):
        options = DraftOptions("neural", min_survival=0.5)
        generate(tiny_target, PROMPTS, drafter=drafter, draft=options, max_running=max_running)


def test_a_small_cache_preempts_and_replays(tiny_target, expected, drafter, monkeypatch):
    preempted = []
    preempt = Scheduler.preempt_newest
    monkeypatch.setattr(Scheduler, "preempt_newest", lambda self: preempted.append(1) or preempt(self))
    cell = LocalCell(tiny_target, drafter=drafter, token_budget=4 * 64, prefill_tokens=32)
    prompts = PROMPTS * 3
    answers = cell.generate(prompts, SAMPLINGS * 3)
    assert [(a.token_ids, a.finish_reason) for a in answers] == expected * 3
    assert cell.stats.tokens_by_source["neural"] and preempted


def test_a_cell_keeps_its_tiers_and_forgets_its_sequences(tiny_target, expected):
    cell = LocalCell(tiny_target, max_running=2, token_budget=8 * 64)
    for _ in range(2):
        answers = cell.generate(PROMPTS, SAMPLINGS)
        assert [(a.token_ids, a.finish_reason) for a in answers] == expected
    assert cell.stats.rounds == 2 * sum(a.stats.rounds for a in answers)


def test_answers_come_as_they_get_ready_and_the_rest_may_be_left(tiny_target, expected):
    cell = LocalCell(tiny_target, max_running=5, token_budget=16 * 64)
    left = cell.generations(PROMPTS, SAMPLINGS)
    first, answer = next(left)
    assert first == 4 and (answer.token_ids, answer.finish_reason) == expected[4]
    answers = cell.generate(PROMPTS, SAMPLINGS)
    assert list(left) == []
    assert [(a.token_ids, a.finish_reason) for a in answers] == expected
    closed = cell.generations(PROMPTS, SAMPLINGS)
    next(closed)
    closed.close()
    assert [a.token_ids for a in cell.generate(PROMPTS[:1], SAMPLINGS[0])] == [expected[0][0]]


def test_stop_strings(tiny_target, expected):
    (output, _), sampling = expected[0], SAMPLINGS[0]
    decode = tiny_target.tokenizer.decode
    texts = [decode(output[:n], skip_special_tokens=True) for n in range(len(output) + 1)]
    stop = next(c for c in reversed(texts[-1]) if c.isalnum())
    count = next(n for n, text in enumerate(texts) if stop in text)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, stop=(stop,))
    for options in (DraftOptions("none"), DraftOptions("suffix")):
        (answer,) = generate(tiny_target, PROMPTS[:1], sampling=params, draft=options)
        assert answer.token_ids == output[:count] and answer.finish_reason == "stop"
        assert answer.text == texts[count][: texts[count].index(stop)]
    assert sampling.ignore_eos


def test_a_drawn_seed_repeats_the_answer(tiny_target):
    hot = SamplingParams(max_new_tokens=12, temperature=1.0)
    (first,) = generate(tiny_target, [[5, 6, 7]], sampling=hot)
    (again,) = generate(tiny_target, [[5, 6, 7]], sampling=SamplingParams(12, temperature=1.0, seed=first.seed))
    (other,) = generate(tiny_target, [[5, 6, 7]], sampling=hot)
    assert first.token_ids == again.token_ids != other.token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, r"prompts\[1\]: holds no tokens"),
        ({"prompts": [[1], [3] * 2048]}, r"prompts\[1\]: 2048 tokens leave no room"),
        ({"prompts": [[-1]]}, r"prompts\[0\]: holds a token id outside of the vocabulary \(0 to 511\)"),
        ({"sampling": [SamplingParams()]}, "sampling: 1 for 2 prompts"),
        ({"sampling": SamplingParams(top_p=0.0)}, "^top_p"),
        ({"policy": VerificationPolicy("lenient")}, "verification.policy: must be one of"),
        ({"slim": object()}, "^slim: "),
        ({"draft": DraftOptions("neural")}, "draft.source: 'neural' needs a drafter"),
        ({"draft": DraftOptions("neutral")}, "draft.source: must be one of"),
        ({"token_budget": 64, "sampling": SamplingParams(max_new_tokens=100)}, "decoding.token_budget: 64 tokens"),
        ({"token_budget": 0}, "decoding.token_budget"),
        ({"max_running": 0}, "decoding.max_running"),
    ],
)
def test_wrong_input_is_named(tiny_target, arguments, message):
    with pytest.raises(SettingError, match=message) as caught:
        generate(tiny_target, **{"prompts": [[1, 2], [3]], **arguments})
    assert "\n" not in str(caught.value)


def test_nothing_in_nothing_out(tiny_target):
    assert generate(tiny_target, []) == []
    assert LocalCell(tiny_target, token_budget=64).generate([]) == []


def test_an_answer_ends_at_the_context(tiny_target):
    context = tiny_target.config.max_context
    (answer,) = generate(tiny_target, [[7] * (context - 3)], sampling=SamplingParams(50, ignore_eos=True))
    assert len(answer.token_ids) == 3 and answer.finish_reason == "length"


def test_other_sequences_do_not_matter(tiny_target, expected):
    for others in itertools.combinations(range(len(PROMPTS)), 2):
        answers = generate(tiny_target, [PROMPTS[i] for i in others], sampling=[SAMPLINGS[i] for i in others])
        assert [a.token_ids for a in answers] == [expected[i][0] for i in others]
