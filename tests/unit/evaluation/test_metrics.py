import math
import random

import pytest

from tierspec.evaluation.metrics import geomean, loops, ratio


def loops_by_definition(ids, max_period, span):
    for start in range(len(ids) - span + 1):
        window = ids[start : start + span]
        for period in range(1, max_period + 1):
            if all(window[i] == window[i - period] for i in range(period, span)):
                return True
    return False


@pytest.mark.parametrize("seed", range(60))
def test_loops_equals_brute_force(seed):
    rng = random.Random(seed)
    max_period, span = rng.choice([(3, 6), (4, 9), (5, 6), (1, 4)])
    for _ in range(40):
        length = rng.randrange(0, 30)
        ids = [rng.randrange(3) for _ in range(length)]
        if rng.random() < 0.6 and length:
            period = rng.randrange(1, max_period + 2)
            unit = [rng.randrange(3) for _ in range(period)]
            repeat = [unit[i % period] for i in range(rng.randrange(span - 2, span + 3))]
            at = rng.randrange(length)
            ids = ids[:at] + repeat + ids[at:]
        assert loops(ids, max_period=max_period, span=span) == loops_by_definition(ids, max_period, span)


@pytest.mark.parametrize(
    ("period", "length", "expected"), [(1, 64, True), (1, 63, False), (32, 64, True), (32, 63, False), (33, 99, False)]
)
def test_loops_at_the_edges_of_its_defaults(period, length, expected):
    assert loops([i % period for i in range(length)]) is expected


def test_a_loop_counts_in_the_middle_of_other_text():
    head, tail = list(range(100, 140)), list(range(200, 240))
    assert loops(head + [7, 8, 9] * 22 + tail)
    assert not loops(head + [7, 8, 9] * 20 + tail)


def test_empty_text_does_not_loop():
    assert not loops([])


def test_loops_refuses_a_span_not_longer_than_the_period():
    with pytest.raises(ValueError, match="max_period"):
        loops([1], max_period=8, span=8)


def test_geomean_and_ratio():
    assert math.isclose(geomean([1.0, 4.0]), 2.0)
    assert geomean([]) is None
    assert ratio(3, 2) == 1.5
    assert ratio(3, 0) is None
