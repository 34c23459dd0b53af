from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.command import execute
from jobs.train import main
from pipelines.training import plan_training
from pipelines.training.forecast import RunClock, forecast, render_forecast
from pipelines.training.sizes import target_parameters
from tests.support.rollouts import write_tiny_rollouts
from tierspec.config import Settings
from tierspec.models import Target


@pytest.fixture
def settings(tiny_settings: Settings, tiny_target: Target) -> Settings:
    rollouts = Path(tiny_settings.run.root) / tiny_settings.run.name / "rollouts"
    write_tiny_rollouts(rollouts / "train", tiny_target, count=10, seed=0)
    return tiny_settings.override("training.batch_sequences=2", "training.heldout_prompts=0")


def forecast_of(settings: Settings) -> dict:
    plan = plan_training(settings, output=Path(settings.run.root) / settings.run.name / "drafter")
    return forecast(settings, plan.samples)


def test_counts_follow_from_the_settings(settings: Settings, tiny_target: Target) -> None:
    found = forecast_of(settings.override("training.max_steps=0", "training.epochs=3"))
    assert (found["samples"], found["steps_per_epoch"], found["steps"]) == (10, 5, 15)
    assert found["response_tokens"] == 240 and found["tokens"] == 320
    assert found["measured"]["seconds"] > 0 and found["measured"]["step_seconds"] > 0
    assert found["memory_gib"]["features"] > 0
    assert "15 (3.0 epochs of 5)" in render_forecast(found)
    assert forecast_of(settings.override("training.max_steps=7", "training.epochs=3"))["steps"] == 7
    assert forecast_of(settings.override("training.max_minutes=0.0001", "training.epochs=50"))["steps"] < 250


def test_zero_shares_what_its_stage_says(settings: Settings) -> None:
    alone = forecast_of(settings)["memory_gib"]
    shared = forecast_of(settings.override("training.workers=2", "training.zero_stage=2"))["memory_gib"]
    assert shared["weights"] == alone["weights"]
    assert shared["gradients"] == pytest.approx(alone["gradients"] / 2)
    assert shared["optimizer"] == pytest.approx(alone["optimizer"] / 2)


def test_the_targets_parameters_are_counted(tiny_target: Target) -> None:
    decoder = tiny_target.decoder
    layers = [decoder.layer_weights(i) for i in range(decoder.config.num_layers)]
    counted = decoder.embedding.numel() + decoder.final_norm.numel()
    counted += sum(tensor.numel() for layer in layers for tensor in layer.values())
    if not decoder.config.tie_embeddings:
        counted += decoder.head_weight().numel()
    assert target_parameters(decoder.config) == counted


@given(st.integers(1, 60), st.integers(1, 20), st.floats(0, 1), st.floats(0.1, 200))
def test_a_budget_in_minutes_is_filled_and_not_exceeded(most: int, epoch: int, kept: float, seconds: float) -> None:
    clock = RunClock(1.0, 2.0, epoch, kept)
    expected = max((n for n in range(1, most + 1) if clock(n) <= seconds), default=1)
    assert clock.steps_within(seconds, most) == expected


def test_a_plan_is_printed_and_nothing_written(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(settings.run.root) / settings.run.name
    before = sorted(run.rglob("*"))
    config = run.parent / "settings.yaml"
    config.write_text(settings.to_yaml())
    flags = {"plan": "x"}
    assert execute("train", main, ["--config", str(config), "--plan"], flags) == 0
    printed = capsys.readouterr().out
    assert "drafter:" in printed and "memory:" in printed and "time:" in printed
    assert sorted(run.rglob("*")) == before
