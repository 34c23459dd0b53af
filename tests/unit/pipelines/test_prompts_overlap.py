from hypothesis import given
from hypothesis import strategies as st

from pipelines.prompts import Prompt
from pipelines.prompts.overlap import OverlapIndex, drop_repeats, split_contaminated, word_grams

WORDS = [f"w{number}" for number in range(60)]


def prompt(name: str, *turns: str) -> Prompt:
    return Prompt(name, "test", turns)


def names(prompts: list[Prompt]) -> list[str]:
    return [prompt.sample_id for prompt in prompts]


def naive_overlap(first: str, second: str) -> bool:
    """The rule, word for word: a shared 13-gram, or 5-grams with a Jaccard index of at least one half."""
    long = word_grams(first, 13) & word_grams(second, 13)
    a, b = word_grams(first, 5), word_grams(second, 5)
    return any(len(gram) == 13 for gram in long) or (bool(a | b) and len(a & b) / len(a | b) >= 0.5)


def test_thirteen_shared_words_are_contamination_and_twelve_are_not() -> None:
    heldout = [prompt("h", " ".join(WORDS[:40]))]
    shared = prompt("13", " ".join(WORDS[5:18] + [f"x{n}" for n in range(40)]))
    less = prompt("12", " ".join(WORDS[5:17] + [f"x{n}" for n in range(40)]))
    clean, contaminated = split_contaminated([shared, less], heldout)
    assert (names(clean), names(contaminated)) == (["12"], ["13"])


def test_case_and_punctuation_do_not_hide_a_copy() -> None:
    heldout = [prompt("h", "How do I sort a list of words?")]
    clean, contaminated = split_contaminated(
        [prompt("copy", "how do i SORT a list, of words"), prompt("own", "Why?")], heldout
    )
    assert (names(clean), names(contaminated)) == (["own"], ["copy"])


def test_any_turn_of_a_conversation_counts() -> None:
    heldout = [prompt("h", "unrelated opening words here", "How do I sort a list of words?")]
    _, contaminated = split_contaminated([prompt("t", "hello there", "How do I sort a list of words?")], heldout)
    assert names(contaminated) == ["t"]


def test_scripts_without_spaces_are_compared_by_character() -> None:
    heldout = [prompt("h", "请解释一下什么是投机解码以及它为什么快")]
    near = prompt("near", "请解释一下什么是投机解码以及它为何快")
    _, contaminated = split_contaminated([near, prompt("far", "写一首关于春天的诗")], heldout)
    assert names(contaminated) == ["near"]


def test_repeats_keep_the_first_and_the_order() -> None:
    assert names(drop_repeats([prompt("a", "x"), prompt("b", "y"), prompt("c", "x"), prompt("d", "x", "y")])) == [
        "a",
        "b",
        "d",
    ]


words = st.lists(st.sampled_from(WORDS[:8]), min_size=1, max_size=24).map(" ".join)


@given(st.lists(words, max_size=5), words)
def test_the_index_is_the_naive_rule(seen: list[str], new: str) -> None:
    index = OverlapIndex()
    for text in seen:
        index.add(text)
    assert index.overlaps(new) == any(naive_overlap(text, new) for text in seen)


@given(words)
def test_a_text_overlaps_itself(text: str) -> None:
    index = OverlapIndex()
    assert not index.overlaps(text)
    index.add(text)
    assert index.overlaps(text)
