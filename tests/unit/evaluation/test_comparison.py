import pytest

from tests.support.scripted_methods import LOOP, PLAIN, Scripted, trials_of
from tierspec.decoding import SamplingParams
from tierspec.evaluation.comparison import Difference, compare, differences, first_difference, summarise
from tierspec.evaluation.methods import Answer, Method


def test_methods_alternate_per_prompt_after_a_warm_up():
    _, calls = trials_of()
    names = [name for name, _, _ in calls]
    warm_up, first, second = names[:3], names[3:12], names[12:]
    assert warm_up == ["autoregressive", "suffix", "transformers"]
    assert all(sampling.max_new_tokens == 8 for _, _, sampling in calls[:3])
    for part in (first, second):
        rounds = [part[i : i + 3] for i in range(0, 9, 3)]
        assert all(sorted(names) == sorted(warm_up) for names in rounds)
        assert len({names[0] for names in rounds}) == 3
    assert {(prompt[0], sampling.seed) for _, prompt, sampling in calls[3:]} == {(1, 5), (2, 6)}


def test_the_median_run_counts_with_its_own_statistics():
    trials, _ = trials_of()
    assert [trial.answers["autoregressive"].seconds for trial in trials] == [3.0, 3.0]
    assert [trial.answers["suffix"].seconds for trial in trials] == [1.0, 1.0]


def test_numbers_splits_and_speedups():
    trials, _ = trials_of()
    entries = summarise(trials, [Difference("transformers", "p2", 79, 0.5)], invariant=True)
    base, suffix, other = entries["autoregressive"], entries["suffix"], entries["transformers"]
    assert base["tokens"] == 160 and base["seconds"] == 6.0 and base["speedup"] == 1.0
    assert suffix["speedup"] == pytest.approx(3.0)
    assert suffix["accept_len"] == 3.0 and suffix["per_position_acceptance"] == [1.0, 1.0, 0.0]
    assert suffix["verifier_calls"] == 6 and suffix["tokens_by_source"] == {"suffix": 4, "target": 2}
    assert other["accept_len"] is None and other["verifier_calls"] is None
    assert other["speedup"] == pytest.approx((159 / 16) / (160 / 6))
    assert (suffix["identical"], suffix["lossless"]) == (2, True)
    assert (other["identical"], other["lossless"]) == (1, False)
    assert suffix["looping"]["prompts"] == suffix["non_looping"]["prompts"] == 1


def test_a_near_tie_is_no_loss_outside_invariant_numerics():
    trials, _ = trials_of()
    near_tie = [Difference("suffix", "p2", 3, 1e-4)]
    assert summarise(trials, near_tie, invariant=False)["suffix"]["lossless"]
    assert not summarise(trials, near_tie, invariant=True)["suffix"]["lossless"]


def test_differences_name_the_place_and_the_gap():
    trials, _ = trials_of(fast={1: LOOP, 2: [0, 1, 99]})
    found = differences(trials, lambda ids: float(len(ids)))  # type: ignore[arg-type]
    assert found == [Difference("suffix", "p2", 2, 3.0), Difference("transformers", "p2", 79, 80.0)]


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [4]) == 0


def test_stop_keeps_whole_prompts_only():
    answers = iter([False, True])
    trials, _ = trials_of(stop=lambda: next(answers))
    assert [trial.prompt_id for trial in trials] == ["p1"]
    assert summarise(trials, [], invariant=True)["suffix"]["non_looping"]["speedup"] is None
    assert summarise([], [], invariant=True) == {}


def test_a_runtime_of_ours_that_changes_its_mind_is_an_error():
    calls: list = []
    base = Scripted("autoregressive", calls, {1: PLAIN}, [1.0], accepted=0)

    def run(prompt_ids, sampling):
        answer = base.run(prompt_ids, sampling)
        return Answer([base.used], answer.seconds, answer.stats)

    with pytest.raises(RuntimeError, match="two ways"):
        compare([Method("autoregressive", run)], [("p", [1])], SamplingParams(80), repeats=2)
