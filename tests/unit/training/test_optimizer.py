import itertools

import pytest
import torch

from tierspec.config import TrainingSettings
from tierspec.errors import SettingError
from tierspec.training.optimizer import GroupClippedAdamW, learning_rate


def optimizer_of(*gradients: list[float]) -> GroupClippedAdamW:
    groups = []
    for number, gradient in enumerate(gradients):
        parameter = torch.nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        groups.append({"name": f"group{number}", "params": [parameter]})
    return GroupClippedAdamW(groups, TrainingSettings(gradient_clip=0.5))


def test_every_group_is_clipped_by_its_own_norm() -> None:
    optimizer = optimizer_of([3.0, 4.0], [0.3, 0.0])
    optimizer.step()
    assert optimizer.gradient_norms == pytest.approx({"group0": 5.0, "group1": 0.3})
    clipped = [group["params"][0].grad.tolist() for group in optimizer.param_groups]
    assert clipped[0] == pytest.approx([0.3, 0.4]) and clipped[1] == pytest.approx([0.3, 0.0])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_no_weight(bad: float) -> None:
    optimizer = optimizer_of([1.0, bad])
    with pytest.raises(SettingError, match=r"^training\.learning_rate is .* gradient of group0 is not finite"):
        optimizer.step()
    assert not optimizer.param_groups[0]["params"][0].any()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate(schedule: str) -> None:
    settings = TrainingSettings(learning_rate=1.0, warmup_ratio=0.1, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(step / 100, settings) for step in range(101)]
    assert rates[0] == 0 and rates[10] == pytest.approx(1.0)
    assert all(a < b for a, b in itertools.pairwise(rates[:11]))
    if schedule == "constant":
        assert rates[100] == 1.0
    else:
        assert rates[55] == pytest.approx(0.5) and rates[100] == 0


def test_wsd_stays_at_its_peak_and_then_falls() -> None:
    settings = TrainingSettings(learning_rate=1.0, warmup_ratio=0.1, schedule="wsd", decay_ratio=0.2)
    rates = [learning_rate(step / 100, settings) for step in range(101)]
    assert rates[5] == pytest.approx(0.5) and min(rates[10:81]) == pytest.approx(1.0)
    assert rates[90] == pytest.approx(0.5) and rates[100] == 0
