"""Which settings of the neural drafter are fastest: measured speeds, and how sure the gain over the present ones is."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tierspec.decoding import DecodingStats
from tierspec.evaluation.comparison import Trial
from tierspec.evaluation.metrics import ratio

_RESAMPLES = 4000


@dataclass(frozen=True)
class Candidate:
    """One setting, measured. `gain` is its speed over the present setting's with the 95 % interval of a bootstrap over
    prompts (our choice); `drafted_per_round` counts draft tokens."""

    setting: str
    tokens_per_s: float
    accept_len: float | None
    drafted_per_round: float | None
    gain: float
    gain_low: float
    gain_high: float


def rank(trials: Sequence[Trial], present: str, *, seed: int = 0) -> list[Candidate]:
    """The settings of `trials`, by name of the method, the present one first, then the fastest first.

    Raises:
        ValueError: no trials.
    """
    if not trials:
        raise ValueError("nothing was measured")
    drawn = np.random.default_rng(seed).choice(len(trials), (_RESAMPLES, len(trials)))
    base_P2 = _tokens_and_seconds(trials, present)
    found = []
    for name in trials[0].answers:
        own_P2 = _tokens_and_seconds(trials, name)
        gains = _speed(own_P2[drawn].sum(1)) / _speed(base_P2[drawn].sum(1))
        low, high = np.quantile(gains, (0.025, 0.975))
        stats = DecodingStats()
        for trial in trials:
            if own := trial.answers[name].stats:
                stats.merge(own)
        found.append(
            Candidate(
                setting=name,
                tokens_per_s=float(_speed(own_P2.sum(0))),
                accept_len=stats.accept_len if stats.rounds else None,
                drafted_per_round=ratio(stats.drafted, stats.rounds),
                gain=float(_speed(own_P2.sum(0)) / _speed(base_P2.sum(0))),
                gain_low=float(low),
                gain_high=float(high),
            )
        )
    return sorted(found, key=lambda candidate: (candidate.setting != present, -candidate.tokens_per_s))


def choose(ranked: Sequence[Candidate]) -> Candidate:
    """The fastest of those that are surely faster than the present setting, which stays if there is none."""
    present, *others = ranked
    return next((candidate for candidate in others if candidate.gain_low > 1.0), present)


def rows(ranked: Sequence[Candidate]) -> list[tuple[str, ...]]:
    """A table for people, its header first."""
    header = ("setting", "tokens/s", "accept len", "drafted/round", "over present", "95 % interval")
    return [header, *map(_row, ranked)]


def _row(candidate: Candidate) -> tuple[str, ...]:
    numbers = asdict(candidate)
    lengths = ("-" if numbers[name] is None else f"{numbers[name]:.2f}" for name in ("accept_len", "drafted_per_round"))
    interval = f"{candidate.gain_low:.3f} to {candidate.gain_high:.3f}"
    return candidate.setting, f"{candidate.tokens_per_s:.1f}", *lengths, f"{candidate.gain:.3f}x", interval


def _tokens_and_seconds(trials: Sequence[Trial], name: str) -> np.ndarray:
    """[P, 2]"""
    return np.array([(len(trial.answers[name].token_ids), trial.answers[name].seconds) for trial in trials])


def _speed(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]
