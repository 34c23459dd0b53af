import numpy as np
import pytest

from tierspec.evaluation.paired import WalkedRun, paired_difference


def run(rate: float, seed: int, samples: int = 60) -> WalkedRun:
    rng = np.random.default_rng(seed)
    rounds = rng.integers(20, 60, samples)
    return WalkedRun(rounds, rng.binomial(rounds, rate))


def test_accept_length_is_a_ratio_of_sums() -> None:
    assert WalkedRun(np.array([1, 3]), np.array([2, 0])).accept_len == 1.5
    assert WalkedRun(np.array([0]), np.array([0])).accept_len == 1.0


def test_a_run_does_not_differ_from_itself() -> None:
    runs = {0: run(0.5, 1), 1: run(0.5, 2)}
    found = paired_difference(runs, runs)
    assert (found.value, found.low, found.high, found.pairs) == (0.0, 0.0, 0.0, 2)


def test_the_interval_holds_a_true_difference_and_excludes_zero_when_it_is_large() -> None:
    base = {s: run(0.5, s) for s in range(3)}
    other = {s: run(0.65, 100 + s) for s in range(4)}
    found = paired_difference(base, other)
    assert found.pairs == 3
    assert 0 < found.low < 0.1 < found.high
    assert found.low < found.value < found.high
    assert paired_difference(base, other) == found


def test_noise_alone_includes_zero() -> None:
    found = paired_difference({s: run(0.5, s) for s in range(3)}, {s: run(0.5, 50 + s) for s in range(3)})
    assert found.low < 0 < found.high


def test_pairing_removes_what_both_share() -> None:
    easy, hard = np.arange(60) % 2 == 0, np.arange(60) % 2 == 1
    rounds = np.full(60, 40)
    accepted = np.where(easy, 36, 4)
    base = {0: WalkedRun(rounds, accepted)}
    other = {0: WalkedRun(rounds, accepted + hard)}
    found = paired_difference(base, other)
    assert found.low > 0 and found.high - found.low < 0.01


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="no two runs share a seed"):
        paired_difference({0: run(0.5, 0)}, {1: run(0.5, 1)})
    with pytest.raises(ValueError, match="different samples"):
        paired_difference({0: run(0.5, 0)}, {0: run(0.5, 1, samples=10)})
