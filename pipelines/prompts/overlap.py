"""Prompts that are too alike: held-out prompts in the training set, and repeats among self-written ones.

The rule (our choice): two user turns overlap if they share 13 consecutive words, or if the Jaccard similarity of their
sets of five consecutive words is at least one half. Words are runs of letters and digits, case ignored; Chinese and
Japanese characters count as a word each.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from pipelines.prompts.prompt import Prompt

SHARED_WORDS = 13
JACCARD_WORDS = 5
JACCARD_LIMIT = 0.5

_CHARACTER = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CHARACTER}]|[^\W_{_CHARACTER}]+")
Gram = tuple[str, ...]


def word_grams(text: str, size: int) -> set[Gram]:
    """The set of `size` consecutive words of `text`; a shorter text is one gram of all its words."""
    words = _WORD.findall(text.casefold())
    if len(words) <= size:
        return {tuple(words)} if words else set()
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


class OverlapIndex:
    """Turns seen so far, asked whether a new one is too alike."""

    def __init__(self, *, shared_words: int = SHARED_WORDS) -> None:
        self._shared_words = shared_words
        self._long: set[Gram] = set()
        self._by_gram: defaultdict[Gram, list[int]] = defaultdict(list)
        self._sizes: list[int] = []
        self._bare: set[str] = set()

    def add(self, turn: str) -> None:
        grams = word_grams(turn, JACCARD_WORDS)
        if not grams:
            self._bare.add(turn.strip())
            return
        for gram in grams:
            self._by_gram[gram].append(len(self._sizes))
        self._sizes.append(len(grams))
        self._long.update(gram for gram in word_grams(turn, self._shared_words) if len(gram) == self._shared_words)

    def overlaps(self, turn: str) -> bool:
        grams = word_grams(turn, JACCARD_WORDS)
        if not grams:
            return turn.strip() in self._bare
        if not self._long.isdisjoint(word_grams(turn, self._shared_words)):
            return True
        common = Counter(other for gram in grams for other in self._by_gram.get(gram, ()))
        return any(
            shared >= JACCARD_LIMIT * (len(grams) + self._sizes[other] - shared) for other, shared in common.items()
        )


def index_of(prompts: Iterable[Prompt]) -> OverlapIndex:
    """An index of all turns of `prompts`."""
    index = OverlapIndex()
    for prompt in prompts:
        for turn in prompt.turns:
            index.add(turn)
    return index


def split_contaminated(prompts: Iterable[Prompt], heldout: Iterable[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts as (clean, contaminated): those with a turn that overlaps a turn of a held-out prompt."""
    index = index_of(heldout)
    clean: list[Prompt] = []
    contaminated: list[Prompt] = []
    for prompt in prompts:
        (contaminated if any(map(index.overlaps, prompt.turns)) else clean).append(prompt)
    return clean, contaminated


def drop_repeats(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first of each group of prompts that ask exactly the same."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.content_hash, prompt)
    return list(first.values())
