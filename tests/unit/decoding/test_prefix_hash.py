"""Hashes of prefixes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierspec.decoding.prefix_hash import PrefixHash

ids = st.lists(st.integers(0, 200_000), max_size=30)


def hashed(token_ids, start=0, value=0):
    hashes = PrefixHash(start, value)
    hashes.extend(token_ids)
    return hashes


@given(ids, ids)
def test_pieces_and_a_late_start_give_the_same(first, second):
    whole = hashed([*first, *second])
    late = hashed(second, len(first), whole.at(len(first)))
    assert len(whole) == len(late) == len(first) + len(second)
    assert all(late.at(n) == whole.at(n) for n in range(len(first), len(whole) + 1))


@given(ids, st.data())
def test_truncated_is_never_extended(token_ids, data):
    length = data.draw(st.integers(0, len(token_ids)))
    hashes = hashed(token_ids)
    hashes.truncate(length)
    assert len(hashes) == length and hashes.at(length) == hashed(token_ids[:length]).at(length)
    assert hashes.at(length + 1) is None


def test_prefixes_differ():
    values = {hashed(token_ids).at(len(token_ids)) for token_ids in ([], [0], [0, 0], [1], [1, 0], [0, 1], [2, 1])}
    assert len(values) == 7 and all(0 <= value < 2**61 for value in values)


def test_what_it_does_not_reach():
    hashes = hashed([5, 6], start=3, value=9)
    assert hashes.at(2) is None and hashes.at(3) == 9 and hashes.at(6) is None
    with pytest.raises(ValueError, match="cannot truncate"):
        hashes.truncate(2)
