"""An ablation on a real local Ray, on the tiny target."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from pipelines.ablation import plan_ablation, run_ablation
from pipelines.cluster import ray_session
from tests.support.rollouts import write_tiny_rollouts
from tierspec.artifacts import run_directory
from tierspec.config import Settings, load_settings
from tierspec.errors import SettingError
from tierspec.models import Target

PRESET = Path(__file__).parents[2] / "configs" / "tiny.yaml"
VARIANTS = "{base: [training.objective=eagle3], control: [training.objective=vat, training.objective.weighting=fixed]}"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Iterator[Settings]:
    overrides = [f"run.root={tmp_path_factory.mktemp('runs')}", "training.max_steps=3", "training.threads=1"]
    made = load_settings(PRESET, [*overrides, f"ablation.variants={VARIANTS}", "ablation.baseline=base"])
    made = made.override("ablation.seeds=[0, 4]")
    for split, count in (("train", 12), ("heldout", 4)):
        write_tiny_rollouts(run_directory(made, "rollouts") / split, tiny_target, count=count, seed=count)
    with ray_session(made):
        yield made


@pytest.fixture(scope="module")
def output(settings: Settings) -> Path:
    return run_directory(settings, "ablation")


def test_runs_are_made_once_and_compared_in_pairs(settings: Settings, output: Path) -> None:
    done = []

    def stop() -> bool:
        done[:] = sorted(path.stem for path in output.glob("results/*.json"))
        return len(done) == 2

    part = run_ablation(settings, output, stop)
    assert done == ["base-seed0", "control-seed0"]
    assert part["missing"] == ["base-seed4", "control-seed4"] and not part["complete"]
    assert part["variants"]["control"]["difference"]["pairs"] == 1
    times = {path: path.stat().st_mtime_ns for path in output.glob("results/*.json")}

    with FileLock(output / "base-seed4" / ".lock"):
        others = run_ablation(settings, output)
    assert others["missing"] == ["base-seed4"]
    whole = run_ablation(settings, output)
    assert whole["complete"] and whole["steps"] == [3]
    assert whole["variants"]["control"]["difference"]["pairs"] == 2
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert (output / "ablation.html").exists() and (output / "ablation.md").exists()

    found = {path.stem: json.loads(path.read_text()) for path in output.glob("results/*.json")}
    first_steps = {name: result["curve"][0] for name, result in found.items()}
    assert first_steps["base-seed0"] == first_steps["control-seed0"]  # the same samples and anchors before any update
    assert first_steps["base-seed0"] != first_steps["base-seed4"]
    assert found["base-seed0"]["loss"] != found["control-seed0"]["loss"]
    assert sum(found["base-seed0"]["rounds"]) > 0 and len(found["base-seed0"]["samples"]) == 4


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["training.depth=2"], r"ablation\.results: .* was made with another training\.depth"),
        (["training.max_minutes=1"], r"training\.max_minutes is 1, which gives every run another number of steps"),
        (["ablation.variants={base: [decoding.groups=2]}"], r"ablation\.variants\.base changes decoding"),
        (
            ["ablation.variants={base: [training.depht=2]}"],
            r"ablation\.variants\.base: unknown setting",
        ),
        (
            ["ablation.variants={base: [training.batch_sequences=1]}"],
            r"base changes training\.batch_sequences, which all",
        ),
        (["ablation.variants={base: [training.max_minutes=1]}"], r"base changes training\.max_minutes, which all"),
        (["ablation.baseline=vat"], r"ablation\.baseline is vat, which is not one of"),
        (["run.name=empty"], r"no rollouts in|no held-out rollouts in"),
    ],
)
def test_bad_input_is_one_line(settings: Settings, output: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        changed = settings.override(*overrides)
        for trial in plan_ablation(changed, output).trials:
            trial.result()
