"""The suffix cache against a counter that rescans the whole text for every question."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierspec.drafters.suffix import SharedSuffixCache, SuffixCache, SuffixLimits, SuffixProposal
from tierspec.drafters.suffix import cache as cache_module
from tierspec.drafters.suffix.native import suffix_library
from tierspec.drafters.suffix.reference import ReferenceAutomaton
from tierspec.errors import SettingError


def occurrences(text: list[int], piece: list[int]) -> list[int]:
    return [i for i in range(len(text) - len(piece) + 1) if text[i : i + len(piece)] == piece]


def brute_force(texts: list[list[int]], context: list[int], max_depth: int, limits: SuffixLimits) -> SuffixProposal:
    """Of several texts, of which the last comes last."""
    context = context[-max_depth:]
    best = SuffixProposal()

    def count(piece: list[int]) -> int:
        return sum(len(occurrences(text, piece)) for text in texts)

    def last(piece: list[int]) -> tuple[int, int]:
        return max((i, found[-1]) for i, text in enumerate(texts) if (found := occurrences(text, piece)))

    def children(node: list[int]) -> set[int]:
        after = [(text, i + len(node)) for text in texts for i in occurrences(text, node)]
        return {text[i] for text, i in after if i < len(text)}

    def chain(node: list[int], budget: int) -> SuffixProposal:
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < budget and len(node) < max_depth and (found := children(node)):
            token = max(found, key=lambda child: (count([*node, child]), last([*node, child])))
            probability *= count([*node, token]) / count(node)
            if probability < limits.min_probability:
                break
            tokens.append(token)
            probabilities.append(probability)
            node = [*node, token]
        return SuffixProposal(tokens, probabilities)

    def tree(node: list[int], budget: int) -> SuffixProposal:
        taken: list[tuple[float, int, int, list[int]]] = []
        waiting: list[tuple[float, int, int, list[int]]] = []
        at, reached, parent = node, 1.0, -1
        while True:
            if len(at) < max_depth:
                for token in children(at):
                    probability = reached * (count([*at, token]) / count(at))
                    if probability >= limits.min_probability:
                        waiting.append((-probability, parent, token, [*at, token]))
            if not waiting or len(taken) == budget:
                break
            waiting.sort(key=lambda entry: entry[:3])
            taken.append(waiting.pop(0))
            at, reached, parent = taken[-1][3], -taken[-1][0], len(taken) - 1
        return SuffixProposal([t[2] for t in taken], [-t[0] for t in taken], parents=[t[1] for t in taken])

    for p in range(1, len(context)):
        node = context[len(context) - p :]
        if not count(node):
            break
        budget = max(0, min(limits.max_tokens, math.floor(limits.factor * p + limits.offset + 1e-6)))
        found = (tree if limits.tree else chain)(node, budget)
        score = 0.0
        for value in found.probabilities:
            score += value
        if score >= best.score:
            best = replace(found, score=score, match_len=p)
    return best


def texts(max_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Pieces of one text over a small alphabet, copies of earlier parts among them."""
    piece = st.one_of(
        st.lists(st.integers(0, 2), max_size=8),
        st.lists(st.integers(0, 9), max_size=8),
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 5)).map(lambda rs: rs[0] * rs[1]),
    )
    pieces = st.lists(piece, min_size=1, max_size=max_size)
    return st.tuples(pieces, st.booleans()).map(lambda pc: pc[0] * 2 if pc[1] else pc[0])


LIMITS = st.builds(
    SuffixLimits,
    max_tokens=st.integers(0, 70),
    min_probability=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0, 1.1]),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.0]),
    offset=st.sampled_from([-2.0, 0.0, 0.5, 3.0]),
    tree=st.booleans(),
)
DEPTHS = st.sampled_from([2, 3, 4, 5, 8, 13, 64])


def propose(cache: SuffixCache, limits: SuffixLimits) -> SuffixProposal:
    return cache.propose(limits.max_tokens, limits.min_probability, limits.factor, limits.offset, tree=limits.tree)


@pytest.fixture(params=["native", "reference"])
def implementation(request, monkeypatch):
    """Either automaton; the reference is what is left without a compiler."""
    if request.param == "reference":
        monkeypatch.setattr(cache_module, "suffix_library", lambda: None)
        monkeypatch.setattr(cache_module, "REFERENCE_MAX_DEPTH", 64)
    return request.param


ANYWHERE = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANYWHERE
@given(pieces=texts(6), max_depth=DEPTHS, limits=LIMITS)
def test_equals_brute_force_after_every_piece(implementation, pieces, max_depth, limits):
    cache = SuffixCache(max_depth)
    text: list[int] = []
    for piece in pieces:
        cache.extend(piece)
        text += piece
        assert propose(cache, limits) == brute_force([text], text, max_depth, limits)
    assert cache.num_tokens == len(text)


@ANYWHERE
@given(text=st.lists(st.integers(0, 1), min_size=1, max_size=60), max_depth=st.integers(2, 9), tree=st.booleans())
def test_equals_brute_force_on_long_binary_texts(implementation, text, max_depth, tree):
    cache = SuffixCache(max_depth)
    cache.extend(text)
    limits = SuffixLimits(64, 0.0, 4.0, tree=tree)
    assert propose(cache, limits) == brute_force([text], text, max_depth, limits)


@ANYWHERE
@given(
    outputs=st.lists(texts(3).map(lambda pieces: [t for piece in pieces for t in piece]), min_size=1, max_size=6),
    context=st.lists(st.integers(0, 2), max_size=12),
    removed=st.sets(st.integers(0, 5)),
    max_depth=DEPTHS,
    max_tokens=st.sampled_from([5, 20, 1000]),
    limits=LIMITS,
)
def test_a_shared_cache_equals_brute_force_after_eviction_and_removal(
    implementation, outputs, context, removed, max_depth, max_tokens, limits
):
    cache = SharedSuffixCache(max_tokens, max_depth)
    held: list[tuple[str, list[int]]] = []
    for index, output in enumerate(outputs):
        cache.add(str(index), output)
        held.append((str(index), output[-max_tokens:]))
        if index in removed:
            cache.remove(str(index // 2))
            held = [entry for entry in held if entry[0] != str(index // 2)]
        held = held[len(held) - len(cache.ids) :]
        assert cache.ids == tuple(name for name, _ in held)
        assert cache.num_tokens == sum(len(tokens) for _, tokens in held) <= max_tokens
        followed = [*context, *output[:3]]
        assert cache.propose(followed, limits) == brute_force([t for _, t in held], followed, max_depth, limits)


@settings(max_examples=100, deadline=None)
@given(pieces=texts(20), limits=LIMITS, max_depth=DEPTHS)
def test_native_and_reference_agree_to_the_bit(pieces, limits, max_depth):
    native, reference = SuffixCache(max_depth), ReferenceAutomaton(max_depth)
    for piece in pieces:
        native.extend(piece)
        reference.extend(piece)
        longest = min(native.num_tokens, max_depth) - 1
        assert propose(native, limits) == reference.propose(limits, longest)


def test_a_full_shared_cache_keeps_the_newest():
    cache = SharedSuffixCache(8)
    for index in range(5):
        cache.add(str(index), [index] * 3)
    assert cache.ids == ("3", "4")
    cache.add("long", list(range(20)))
    assert cache.ids == ("long",) and cache.num_tokens == 8


def test_without_a_compiler_the_depth_is_lowered_and_it_says_so(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    suffix_library.cache_clear()
    try:
        assert SuffixCache(64).max_depth == cache_module.REFERENCE_MAX_DEPTH
    finally:
        suffix_library.cache_clear()
    assert "smaller depth" in caplog.text


@settings(max_examples=50, deadline=None)
@given(text=st.lists(st.integers(0, 3), max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_pieces_do_not_matter(text, cuts):
    whole, pieced = SuffixCache(8), SuffixCache(8)
    whole.extend(text)
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        pieced.extend(text[start:end])
    assert whole.propose(16) == pieced.propose(16)


def test_a_repeat_seen_once_scores_half_its_length():
    cache = SuffixCache()
    cache.extend([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert cache.propose(64) == SuffixProposal([4, 5, 6], [0.5, 0.5, 0.5], 1.5, 3)


def test_match_and_draft_share_the_depth():
    block = list(range(100))
    cache = SuffixCache(64)
    cache.extend(block + block[:70])
    drafts = [cache.propose(64, factor=factor) for factor in (1.0, 2.0, 4.0)]
    assert [(draft.match_len, len(draft.tokens)) for draft in drafts] == [(32, 32), (22, 42), (13, 51)]


@pytest.mark.parametrize("text", [[], [7]])
def test_too_short_a_context_matches_nothing(text):
    cache = SuffixCache()
    cache.extend(text)
    assert cache.propose(8) == SuffixProposal()


def test_without_a_draft_the_longest_match_is_named():
    cache = SuffixCache()
    cache.extend([1, 2, 3])
    assert cache.propose(8) == SuffixProposal([], [], 0.0, 2)


def test_of_equally_frequent_children_the_last_seen_is_followed():
    cache = SuffixCache()
    cache.extend([1, 5, 1, 6, 1])
    assert cache.propose(1).tokens == [6]
    cache.extend([5, 1, 6, 9, 1])
    assert cache.propose(1).tokens == [6]


def test_one_repeated_token_stays_small():
    cache = SuffixCache(16)
    cache.extend([3] * 20)
    small = cache.nbytes
    cache.extend([3] * 20_000)
    assert cache.nbytes == small
    assert cache.propose(64).tokens == [3] * 8


def test_too_small_a_depth_is_refused():
    with pytest.raises(SettingError, match="max_depth"):
        SuffixCache(1)
