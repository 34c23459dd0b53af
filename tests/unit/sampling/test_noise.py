import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.sampling import gumbel, gumbel_all, philox4x32

WORD = 0xFFFFFFFF


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, straight from the paper's round function."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def reference_gumbel(seed: int, stream: int, position: int, token: int) -> float:
    word = reference_philox([token >> 2, position, stream, 0], [seed & WORD, (seed >> 32) & WORD])[token & 3]
    return -math.log(-math.log(((word >> 8) + 0.5) / 2**24))


def lanes(counter: list[int], key: list[int]) -> list[int]:
    words = philox4x32([torch.tensor([word]) for word in counter], [torch.tensor([word]) for word in key])
    return [int(word) for word in words]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    assert lanes(words[0], words[1]) == words[2]
    assert reference_philox(words[0], words[1]) == words[2]


words_32 = st.integers(0, WORD)


@settings(max_examples=200, deadline=None)
@given(counter=st.tuples(*[words_32] * 4), key=st.tuples(words_32, words_32))
def test_words_equal_the_reference(counter, key):
    assert lanes(list(counter), list(key)) == reference_philox(list(counter), list(key))


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), words_32, words_32), min_size=1, max_size=4),
    ids=st.lists(st.integers(0, 2**32), min_size=1, max_size=9),
)
def test_noise_equals_the_reference_row_by_row(rows, ids):
    seed, stream, position = (list(values) for values in zip(*rows, strict=True))
    noise = gumbel(seed, stream, position, torch.tensor(ids))
    expected = [[reference_gumbel(*row, token) for token in ids] for row in rows]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 4099])
def test_all_ids_and_chosen_ids_agree_bitwise(size):
    keys = ([3, -4], [0, 1], [17, 2**31])
    everything = gumbel_all(*keys, size)
    assert everything.shape == (2, size) and everything.dtype == torch.float32
    assert torch.equal(everything, gumbel(*keys, torch.arange(size)))
    some = torch.randperm(size, generator=torch.Generator().manual_seed(0))[: max(1, size // 2)]
    assert torch.equal(everything[:, some], gumbel(*keys, some))
    assert torch.equal(everything[:, some], gumbel(*keys, torch.stack((some, some))))


def test_the_smallest_and_largest_uniforms_are_finite():
    noise = gumbel_all(list(range(400)), [0] * 400, [0] * 400, 4096)
    assert noise.isfinite().all()
    assert noise.min() >= -2.86 and noise.max() <= 17.33


@pytest.mark.parametrize("changed", ["seed", "stream", "position"])
def test_every_part_of_the_key_matters(changed):
    key = {"seed": [5], "stream": [0], "position": [9]}
    other = {**key, changed: [key[changed][0] + 1]}
    ids = torch.arange(256)
    assert (gumbel(**key, ids=ids) != gumbel(**other, ids=ids)).float().mean() > 0.99


def test_the_high_half_of_the_seed_matters():
    ids = torch.arange(64)
    assert not torch.equal(gumbel([1], [0], [0], ids), gumbel([1 + 2**32], [0], [0], ids))
