"""Whether one way of training beats another: accept lengths of paired runs, and how sure their difference is.

Two runs are paired if they share the seed; they walked the same held-out samples. A bootstrap (our choice) draws seeds
and samples with replacement, the same for both sides of a pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000


@dataclass(frozen=True)
class WalkedRun:
    """What a run's drafter did on the held-out samples: rounds and accepted draft tokens [S], int."""

    rounds: np.ndarray
    accepted: np.ndarray

    @property
    def accept_len(self) -> float:
        """Accepted tokens per round, plus one."""
        return 1.0 + float(self.accepted.sum() / max(1, self.rounds.sum()))


@dataclass(frozen=True)
class Difference:
    """Relative difference of mean accept lengths, (other - base) / base, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int


def paired_difference(base: Mapping[int, WalkedRun], other: Mapping[int, WalkedRun], *, seed: int = 0) -> Difference:
    """Compares the runs of the seeds that both have, at least one.

    Accept lengths are ratios of sums over samples, averaged over seeds.

    Raises:
        ValueError: no seed in common, or runs over different numbers of samples.
    """
    seeds = sorted(base.keys() & other.keys())
    if not seeds:
        raise ValueError("no two runs share a seed")
    sides = []
    for runs in (base, other):
        if len({len(runs[s].rounds) for s in seeds}) > 1:
            raise ValueError("the runs walked different samples")
        sides.append((np.stack([runs[s].rounds for s in seeds]), np.stack([runs[s].accepted for s in seeds])))
    if sides[0][0].shape != sides[1][0].shape:
        raise ValueError("the runs walked different samples")
    everything = np.arange(len(seeds)), np.arange(sides[0][0].shape[1])
    rng = np.random.default_rng(seed)
    drawn = [
        _difference(sides, rng.choice(everything[0], len(seeds)), rng.choice(everything[1], len(everything[1])))
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Difference(_difference(sides, *everything), float(low), float(high), len(seeds))


def _difference(sides: list[tuple[np.ndarray, np.ndarray]], seeds: np.ndarray, samples: np.ndarray) -> float:
    base, other = (
        np.mean(1.0 + accepted[seeds][:, samples].sum(1) / np.maximum(1, rounds[seeds][:, samples].sum(1)))
        for rounds, accepted in sides
    )
    return float(other / base - 1.0)
