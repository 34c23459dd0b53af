"""The suffix cache against a counter that rescans the whole text for every question."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.drafters.suffix import SuffixCache, SuffixProposal
from tierspec.errors import SettingError


def occurrences(text: list[int], piece: list[int]) -> list[int]:
    return [i for i in range(len(text) - len(piece) + 1) if text[i : i + len(piece)] == piece]


def brute_force(
    text: list[int], max_depth: int, max_tokens: int, min_probability: float, factor: float, offset: float
) -> SuffixProposal:
    context = text[-max_depth:]
    best = SuffixProposal()
    for p in range(1, len(context)):
        node = context[len(context) - p :]
        if not occurrences(text, node):
            break
        budget = max(0, min(max_tokens, math.floor(factor * p + offset + 1e-6)))
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < budget and len(node) < max_depth:
            children = {text[i + len(node)]: [] for i in occurrences(text, node) if i + len(node) < len(text)}
            if not children:
                break
            found = {token: occurrences(text, [*node, token]) for token in children}
            token = max(found, key=lambda child: (len(found[child]), found[child][-1]))
            probability *= len(found[token]) / len(occurrences(text, node))
            if probability < min_probability:
                break
            tokens.append(token)
            probabilities.append(probability)
            node = [*node, token]
        score = 0.0
        for value in probabilities:
            score += value
        if score >= best.score:
            best = SuffixProposal(tokens, probabilities, score, p)
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


@settings(max_examples=300, deadline=None)
@given(
    pieces=texts(6),
    max_depth=st.sampled_from([2, 3, 4, 5, 8, 13, 64]),
    max_tokens=st.integers(0, 70),
    min_probability=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0, 1.1]),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.0]),
    offset=st.sampled_from([-2.0, 0.0, 0.5, 3.0]),
)
def test_equals_brute_force_after_every_piece(pieces, max_depth, max_tokens, min_probability, factor, offset):
    cache = SuffixCache(max_depth)
    text: list[int] = []
    for piece in pieces:
        cache.extend(piece)
        text += piece
        expected = brute_force(text, max_depth, max_tokens, min_probability, factor, offset)
        assert cache.propose(max_tokens, min_probability, factor, offset) == expected
    assert cache.num_tokens == len(text)


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.integers(0, 1), min_size=1, max_size=60), max_depth=st.integers(2, 9))
def test_equals_brute_force_on_long_binary_texts(text, max_depth):
    cache = SuffixCache(max_depth)
    cache.extend(text)
    assert cache.propose(64, 0.0, 4.0) == brute_force(text, max_depth, 64, 0.0, 4.0, 0.0)


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
    cache.extend([3] * 2000)
    assert len(cache._count) <= 17
    assert cache.propose(64).tokens == [3] * 8


def test_too_small_a_depth_is_refused():
    with pytest.raises(SettingError, match="max_depth"):
        SuffixCache(1)
