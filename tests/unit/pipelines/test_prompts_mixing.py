import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.prompts import Prompt, read_prompts
from pipelines.prompts.diversity import diversity
from pipelines.prompts.mixing import mixed
from tierspec.config import Settings
from tierspec.errors import SettingError


def prompts(name: str, count: int) -> list[Prompt]:
    return [Prompt(f"{name}{i}", name, (f"question {i} of {name}",)) for i in range(count)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), min_size=1, max_size=4), st.integers(0, 80))
def test_shares_are_as_wanted_and_no_more_than_there_is(sizes: list[tuple[int, int]], limit: int) -> None:
    weights = [float(weight) for _, weight in sizes]
    sets = [prompts(chr(97 + i), size) for i, (size, _) in enumerate(sizes)]
    if not any(weights):
        return
    chosen = mixed(sets, weights, limit, lambda members: sorted(members, key=lambda p: p.sample_id))
    assert len({prompt.sample_id for prompt in chosen}) == len(chosen) <= (limit or 1000) + len(sets)
    for members, weight in zip(sets, weights, strict=True):
        count = sum(prompt in members for prompt in chosen)
        assert abs(count - weight / sum(weights) * len(chosen)) <= len(sets)
        assert count <= len(members)


def test_without_weights_all_are_taken_up_to_the_limit() -> None:
    sets = [prompts("a", 3), prompts("b", 2)]
    assert mixed(sets, (), 0, list) == sets[0] + sets[1]
    assert mixed(sets, (), 4, list) == (sets[0] + sets[1])[:4]


@pytest.mark.parametrize("weights", ["[1]", "[0, 0]", "[1, 2, 3]"])
def test_weights_that_do_not_fit_are_named(weights: str) -> None:
    with pytest.raises(SettingError, match=r"^prompts\.weights is .* each of the 2 sets in prompts\.train"):
        Settings().override("prompts.train=[builtin:train, a.jsonl]", f"prompts.weights={weights}")


def test_a_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str, streaming: bool) -> Any:
        if name != "someone/questions":
            raise FileNotFoundError(f"Dataset {name} does not exist\nand more")
        return [{"prompt": f"{split} {i}"} for i in range(2)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    found = read_prompts(["hub:someone/questions", "hub:someone/questions:test"], "prompts.train")
    assert [prompt.turns[0] for prompt in found] == ["train 0", "train 1", "test 0", "test 1"]
    assert {prompt.source for prompt in found} == {"someone/questions"}
    with pytest.raises(SettingError, match=r"^prompts\.train: hub:a/b cannot be read: Dataset a/b does not exist$"):
        read_prompts(["hub:a/b"], "prompts.train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SettingError, match=r"needs the package datasets: pip install 'tierspec\[hub\]'"):
        read_prompts(["hub:a/b"], "prompts.train")


def test_repetition_shows_in_every_figure() -> None:
    words = [f"w{i}" for i in range(4000)]
    varied = diversity([Prompt(str(i), "s", (" ".join(words[20 * i : 20 * i + 20]),)) for i in range(200)])
    alike = diversity(
        [Prompt(str(i), "s", (f"please write a short story about a brave cat number {i}",)) for i in range(200)]
    )
    assert varied["prompts"] == alike["prompts"] == 200 and varied["median_words"] == 20
    assert varied["distinct_3grams"] == 1.0 > 0.5 > alike["distinct_3grams"]
    assert varied["compressed"] > 2 * alike["compressed"]
    assert (varied["alike"], alike["alike"]) == (0.0, 0.995)
    assert diversity([])["prompts"] == 0
