import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierspec.config import ObjectiveSettings
from tierspec.training.simulation import first_rejection
from tierspec.training.weighting import (
    adaptive_weights,
    base_schedule,
    cutoff_weights,
    dpace_weights,
    position_weights,
)

DFLASH_WEIGHTS = [1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679, 0.3189]
DFLASH_WEIGHTS += [0.2765, 0.2397, 0.2077, 0.1801, 0.1561, 0.1353]


@pytest.mark.parametrize(
    ("base", "star", "expected"),
    [
        ("eagle", 1, [1, 0.8, 0.64, 0.512, 0.4096, 0.3277, 0.2621]),
        ("eagle", 3, [1, 1, 1, 0.8, 0.64, 0.512, 0.4096]),
        ("eagle", 7, [1] * 7),
        ("eagle", 8, [1] * 7),
        (
            "dflash",
            1,
            DFLASH_WEIGHTS,
        ),
        ("dflash", 15, [1] * 15),
        ("dflash", 16, [1] * 15),
    ],
)
def test_check_values_of_the_adaptive_weights(base: str, star: int, expected: list[float]) -> None:
    depth = len(expected)
    schedule = base_schedule(ObjectiveSettings(schedule="geometric" if base == "eagle" else "exponential"), depth)
    weights = adaptive_weights(torch.tensor(star), schedule)
    assert weights.tolist() == pytest.approx(expected, abs=5e-5)


def test_sums_of_the_check_values() -> None:
    eagle = base_schedule(ObjectiveSettings(decay=0.8), 7)
    dflash = base_schedule(ObjectiveSettings(schedule="exponential"), 15)
    sums = [adaptive_weights(torch.tensor(s), eagle).sum().item() for s in (1, 3, 7)]
    assert sums == pytest.approx([3.951, 5.362, 7], abs=1e-3)
    sums = [adaptive_weights(torch.tensor(s), dflash).sum().item() for s in (1, 4, 15)]
    assert sums == pytest.approx([6.631, 9.159, 15], abs=1e-3)


def test_schedules_by_hand() -> None:
    assert base_schedule(ObjectiveSettings(decay=0.5), 3).tolist() == [1.0, 0.5, 0.25]
    assert base_schedule(ObjectiveSettings(schedule="exponential", gamma=2.0), 2).tolist() == pytest.approx(
        [1.0, 0.60653], abs=1e-5
    )
    assert base_schedule(ObjectiveSettings(schedule="uniform", decay=0.5), 3).tolist() == [1.0] * 3


def test_a_cut_off_keeps_the_first_rejection_itself() -> None:
    base = torch.tensor([1.0, 0.8, 0.64])
    stars = torch.tensor([1, 2, 4])
    assert cutoff_weights(stars, base).tolist() == [
        pytest.approx(row) for row in ([1, 0, 0], [1, 0.8, 0], [1, 0.8, 0.64])
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.data())
def test_dpace_weights_are_sums_of_products(probabilities: list[float], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(probabilities)))
    expected = []
    for k in range(len(probabilities)):
        total = 0.0
        for m in range(k, length):
            product = 1.0
            for i in range(m + 1):
                product *= 0.5 + 0.5 * probabilities[i]
            total += product
        expected.append(total)
    valid = torch.arange(len(probabilities)) < length
    assert dpace_weights(torch.tensor(probabilities), valid).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_weightings_depend_on_the_valid_prefix_alone_and_agree_up_to_the_rejection(
    accepted: list[bool], data: st.DataObject
) -> None:
    depth, length = len(accepted), data.draw(st.integers(0, len(accepted)))
    mask, valid = torch.tensor(accepted), torch.arange(depth) < length
    star = int(first_rejection(mask, valid))
    uniform = ObjectiveSettings(schedule="uniform")
    cut = position_weights(mask, mask.float(), valid, uniform.model_copy(update={"weighting": "cutoff"}))
    adaptive = position_weights(mask, mask.float(), valid, ObjectiveSettings(decay=0.5))
    assert cut.tolist() == [1.0 if k <= star else 0.0 for k in range(1, depth + 1)]
    assert adaptive.tolist() == [0.5 ** max(0, k - star) for k in range(1, depth + 1)]
