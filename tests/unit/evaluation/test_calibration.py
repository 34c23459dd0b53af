import pytest

from tierspec.decoding import DecodingStats
from tierspec.evaluation.calibration import choose, rank, rows
from tierspec.evaluation.comparison import Trial
from tierspec.evaluation.methods import Answer


def answer(seconds: float, drafted: int, accepted: int) -> Answer:
    stats = DecodingStats()
    stats.record_round("neural", drafted, accepted, accepted + 1, False)
    return Answer(list(range(20)), seconds, stats)


def trials(**seconds: list[float]) -> list[Trial]:
    times = zip(*seconds.values(), strict=True)
    return [
        Trial(f"p{i}", [1], {name: answer(second, 3, 1) for name, second in zip(seconds, row, strict=True)})
        for i, row in enumerate(times)
    ]


def test_the_fastest_of_those_surely_faster_is_chosen() -> None:
    measured = trials(present=[1.0] * 8, lucky=[0.1, 1.2] * 4, sure=[0.8, 0.85] * 4, better=[0.7, 0.75] * 4)
    ranked = rank(measured, "present")
    assert [candidate.setting for candidate in ranked] == ["present", "lucky", "better", "sure"]
    present, lucky, better, _ = ranked
    assert (present.gain, present.gain_low, present.gain_high) == (1.0, 1.0, 1.0)
    assert lucky.gain == pytest.approx(1 / 0.65) and lucky.gain_low < 1
    assert better.gain == pytest.approx(1 / 0.725) and 1 / 0.75 <= better.gain_low < better.gain < better.gain_high
    assert (better.accept_len, better.drafted_per_round) == (2.0, 3.0)
    assert choose(ranked) == better
    assert [row[0] for row in rows(ranked)][1:] == ["present", "lucky", "better", "sure"]


def test_what_may_be_luck_does_not_replace_the_present_setting() -> None:
    measured = trials(other=[0.2, 1.5, 1.2, 0.9, 1.1, 0.7], present=[1.0] * 6)
    ranked = rank(measured, "present")
    assert ranked[0].setting == "present" and ranked[1].gain > 1 > ranked[1].gain_low
    assert choose(ranked).setting == "present"
    with pytest.raises(ValueError, match="nothing was measured"):
        rank([], "present")
