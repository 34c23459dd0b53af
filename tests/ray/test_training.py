"""Drafter training on a real local Ray, with real DeepSpeed, on the tiny target."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from pipelines.cluster import ray_session
from pipelines.training import train_drafter
from pipelines.training.records import read_records
from tests.support.rollouts import write_tiny_rollouts
from tierspec.artifacts import write_provenance
from tierspec.config import Settings, load_settings
from tierspec.drafters import load_drafter, read_drafter
from tierspec.errors import SettingError
from tierspec.models import Target
from tierspec.training.data import DataOrder, read_rollouts, sample_anchors
from tierspec.training.families import build_trainee
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.optimizer import GroupClippedAdamW
from tierspec.training.walk import walk

STEPS = 160
ROOT = Path(__file__).parents[2]
PRESET = ROOT / "configs" / "tiny.yaml"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    root = tmp_path_factory.mktemp("rollouts")
    write_tiny_rollouts(root / "train", tiny_target, count=24, seed=0)
    write_tiny_rollouts(root / "heldout", tiny_target, count=4, seed=1)
    return root


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    settings = load_settings(PRESET, [f"run.root={tmp_path_factory.mktemp('session')}"])
    with ray_session(settings):
        yield


class Line:
    """Training runs of one folder on the same rollouts."""

    def __init__(self, root: Path, rollouts: Path) -> None:
        self.root, self.rollouts = root, rollouts

    def settings(self, name: str, *overrides: str) -> Settings:
        return load_settings(PRESET, [f"run.root={self.root}", f"run.name={name}", "training.threads=1", *overrides])

    def train(self, name: str, *overrides: str, **rest: Any) -> dict[str, Any]:
        settings, output = self.settings(name, *overrides), self.root / name / "drafter"
        write_provenance(output, settings, ["jobs.train"])
        return train_drafter(settings, output=output, rollouts=self.rollouts / "train", **rest)

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [r for r in read_records(self.root / name / "training" / "metrics.jsonl") if r["kind"] == kind]

    def checkpoints(self, name: str) -> list[Path]:
        found = (self.root / name / "training" / "checkpoints").glob("checkpoint_*")
        return sorted(path for path in found if path.is_dir())

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """The fp32 weights and moments of the last checkpoint."""
        return load_file(self.checkpoints(name)[-1] / "state.safetensors")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, rollouts: Path, session: None) -> Line:
    return Line(tmp_path_factory.mktemp("runs"), rollouts)


LONG = (f"training.max_steps={STEPS}", "training.epochs=20", "training.checkpoint_every=60", "training.max_failures=1")


@pytest.fixture(scope="module")
def whole(line: Line) -> dict[str, Any]:
    """An uninterrupted run."""
    return line.train("whole", *LONG)


def test_a_run_leaves_a_drafter_that_drafts(line: Line, whole: dict[str, Any], tiny_target: Target) -> None:
    assert whole["finished"] and whole["step"] == STEPS
    output = line.root / "whole" / "drafter"
    names = {
        "config.json",
        "model.safetensors",
        "metrics.json",
        "metrics.jsonl",
        "result.json",
        "sample.json",
        "training.html",
        "run.yaml",
        "command.txt",
    }
    assert names <= {path.name for path in output.iterdir()}
    assert json.loads((output / "result.json").read_text()).items() >= whole.items()

    drafter = load_drafter(output, tiny_target)
    heldout = read_rollouts(line.rollouts / "heldout", 128).samples[::2]
    features = TargetFeatures(tiny_target.decoder, drafter.feature_layers, max_length=128)
    assert walk(drafter, features, heldout, 3).accept_len == pytest.approx(whole["accept_len"], abs=0.1)


def test_checkpoints_carry_what_is_needed_and_are_pruned(line: Line, whole: dict[str, Any]) -> None:
    checkpoints = line.checkpoints("whole")
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        names = {"state.safetensors", "progress.json", "inference", "metrics.json"}
        assert names | {"run.yaml", "command.txt", "versions.json"} <= {path.name for path in checkpoint.iterdir()}
        read_drafter(checkpoint / "inference")
        assert json.loads((checkpoint / "metrics.json").read_text())["heldout"]["accept_len"] >= 1
    assert [record["step"] for record in line.records("whole", "heldout")] == [60, 120, STEPS]
    assert [record["step"] for record in line.records("whole", "step")] == list(range(1, STEPS + 1))
    assert any((line.root / "whole" / "training" / "tensorboard").iterdir())


def test_a_stopped_and_then_killed_run_ends_with_the_same_weights(line: Line, whole: dict[str, Any]) -> None:
    stopped = line.train("broken", *LONG, stop=lambda: bool(line.records("broken", "step")))
    assert not stopped["finished"] and 0 < stopped["step"] < STEPS
    assert not (line.root / "broken" / "drafter" / "config.json").exists()

    killed: list[int] = []

    def kill_the_worker_once() -> bool:
        records = line.records("broken", "start")
        if not killed and records and len(line.records("broken", "step")) > stopped["step"]:
            killed.append(records[0]["pid"])
            os.kill(killed[0], signal.SIGKILL)
        return False

    resumed = line.train("broken", *LONG, stop=kill_the_worker_once)
    assert killed and resumed["finished"]
    expected = line.weights("whole")
    got = line.weights("broken")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    losses = [[record["loss"] for record in line.records(name, "step")] for name in ("whole", "broken")]
    assert losses[0] == losses[1]
    assert resumed["accept_len"] == whole["accept_len"]


def test_a_run_whose_driver_and_then_everything_is_killed_ends_with_the_same_weights(
    line: Line, whole: dict[str, Any]
) -> None:
    begun = 0
    for everything in (False, True):
        settings = line.settings("killed", *LONG).to_yaml()
        config = line.root / "killed.yaml"
        config.write_text(settings)
        rollouts = line.root / "killed" / "rollouts"
        if not rollouts.exists():
            shutil.copytree(line.rollouts, rollouts)
        with subprocess.Popen([sys.executable, "-m", "jobs.train", "--config", str(config)], cwd=ROOT) as driver:
            family = [psutil.Process(driver.pid)]
            try:
                while len(line.records("killed", "step")) <= begun + 20:
                    assert driver.poll() is None
                    time.sleep(0.1)
                family += family[0].children(recursive=True)
                if everything:
                    for process in family:
                        _kill(process)
                driver.kill()
            finally:
                _, alive = psutil.wait_procs(family, timeout=60)
                for process in alive:
                    _kill(process)
        begun = max(record["step"] for record in line.records("killed", "step"))
    (line.root / "killed" / "training" / "checkpoints" / "checkpoint_of_a_killed_upload").mkdir()
    resumed = line.train("killed", *LONG)
    expected, got = line.weights("whole"), line.weights("killed")
    assert resumed["finished"] and all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert len(line.checkpoints("killed")) == 2
    losses = [[record["loss"] for record in line.records(name, "step")] for name in ("whole", "killed")]
    assert losses[0] == losses[1]


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def test_a_finished_run_is_not_repeated(line: Line, whole: dict[str, Any]) -> None:
    again = line.train("whole", *LONG)
    assert again.items() >= whole.items()


def test_a_run_killed_before_its_drafter_was_there_publishes_what_it_measured(
    line: Line, whole: dict[str, Any]
) -> None:
    shutil.copytree(line.root / "whole" / "training", line.root / "late" / "training")
    late = line.train("late", *LONG)
    same = ("accept_len", "per_position_acceptance", "train_accept_len", "loss", "best_step", "tokens")
    assert {name: late[name] for name in same} == {name: whole[name] for name in same}
    assert [record["step"] for record in line.records("late", "heldout")] == [60, 120, STEPS]


def test_other_settings_do_not_go_on_from_a_state(line: Line, whole: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"training\.depth is 2 now, but was 3 .* training\.overwrite"):
        line.train("whole", *LONG, "training.depth=2")


def test_workers_and_micro_batches_give_the_steps_of_one_plain_batch(line: Line, tiny_target: Target) -> None:
    overrides = ("training.workers=2", "training.accumulation=2", "training.batch_sequences=1", "training.max_steps=3")
    line.train("ranks", *overrides, "training.heldout_prompts=0")

    settings = line.settings("ranks", *overrides)
    training, samples = settings.training, read_rollouts(line.rollouts / "train", 128).samples
    trainee, _ = build_trainee(settings, tiny_target, samples)
    features = TargetFeatures(tiny_target.decoder, trainee.drafter.config.feature_layers, max_length=128)
    optimizer = GroupClippedAdamW(trainee.parameter_groups(), training)
    order = DataOrder([len(sample.token_ids) for sample in samples], 4, settings.run.seed)
    for step, record in enumerate(line.records("ranks", "step")):
        numbers = order.samples(step)
        part = [samples[number] for number in numbers]
        anchors = [sample_anchors(s, training.anchors, (settings.run.seed, step, i)) for i, s in enumerate(part)]
        captured = features(
            [FeatureRequest(n, s.token_ids, s.first_anchor) for n, s in zip(numbers, part, strict=True)]
        )
        loss, monitors = trainee(trainee.collate(part, captured, anchors))
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = record["learning_rate"] * group["rate"]
        optimizer.step()
        expected = {"loss": loss.item(), **{f"gradient_norm/{n}": v for n, v in optimizer.gradient_norms.items()}}
        expected |= {name: value for name, value in monitors.scalars().items() if not name.startswith("head_auc")}
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert step == 2
    found = read_drafter(line.root / "ranks" / "drafter")
    assert found.verification_head.keys() == {"weight", "bias"}
    for name, tensor in trainee.drafter.state_dict().items():
        torch.testing.assert_close(found.weights[name].float(), tensor, rtol=2e-2, atol=1e-3)


def test_features_from_everywhere_give_the_same_losses(line: Line) -> None:
    few = ("training.workers=2", "training.accumulation=2", "training.max_steps=5", "training.epochs=5")
    few += ("training.heldout_prompts=0", "training.objective.verification=rejection")
    losses = {}
    for source in ("inline", "cached", "streamed"):
        if source == "streamed":  # goes on from the middle, so the stream does too
            begun = partial(line.records, source, "step")
            line.train(source, *few, f"training.features={source}", stop=lambda begun=begun: bool(begun()))
        assert line.train(source, *few, f"training.features={source}")["finished"]
        losses[source] = [record["loss"] for record in line.records(source, "step")]
    assert len(losses["inline"]) == 5
    assert losses["inline"] == losses["cached"] == losses["streamed"]
    assert len(list((line.root / "cached" / "features").glob("*/*.safetensors"))) == 1


def test_a_large_folder_of_features_is_refused(line: Line) -> None:
    with pytest.raises(SettingError, match=r"^training\.features is cached: 768 tokens take 0\.0 GB, more than"):
        line.train("large", "training.features=cached", "training.feature_disk_gb=0.0001")


def test_a_run_goes_on_with_other_workers_and_another_zero_stage(line: Line) -> None:
    few = ("training.max_steps=12", "training.epochs=12", "training.heldout_prompts=0", "training.batch_sequences=1")
    line.train("steady", *few, "training.workers=2")
    # the checkpoint behind the steps waited for takes longer than the stop needs to arrive
    parts = ((2, 3, ("training.workers=2",)), (5, 7, ("training.accumulation=2",)))
    for least, checkpoint, part in parts:
        reached = partial(lambda least: len(line.records("moved", "step")) >= least, least)
        line.train("moved", *few, f"training.checkpoint_every={checkpoint}", *part, stop=reached)
    line.train("moved", *few, "training.workers=2", "training.zero_stage=3")
    starts = [record["step"] for record in line.records("moved", "start")]
    assert len(starts) == 1 and 5 <= starts[0] <= 8
    losses = [[record["loss"] for record in line.records(name, "step")] for name in ("steady", "moved")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 12
    expected = line.weights("steady")
    for name, tensor in line.weights("moved").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
    with pytest.raises(SettingError, match=r"training\.batch_sequences is 1 samples a step now, but was 2"):
        line.train("moved", *few, "training.workers=1")


@pytest.mark.parametrize(("family", "stages"), [("eagle3", (0, 2, 3)), ("dflash", (0, 3))])
def test_zero_stages_give_the_same_losses(line: Line, family: str, stages: tuple[int, ...]) -> None:
    few = ("training.workers=2", "training.max_steps=4", "training.epochs=5", "training.heldout_prompts=2")
    losses = {}
    for stage in stages:
        name = f"{family}-zero{stage}"
        line.train(name, *few, f"training.zero_stage={stage}", f"drafter.family={family}", "drafter.layers=2")
        losses[stage] = [record["loss"] for record in line.records(name, "step")]
        assert read_drafter(line.root / name / "drafter").config.family == family
    assert all(losses[stage] == pytest.approx(losses[0], rel=1e-4) for stage in stages)
    assert not (line.root / f"{family}-zero3" / "drafter" / "sample.json").exists()


def test_mistakes_are_named_before_any_worker_starts(line: Line, tmp_path: Path) -> None:
    settings = line.settings("mistakes")
    with pytest.raises(SettingError, match="no rollouts in"):
        train_drafter(settings, output=tmp_path / "drafter")
    with pytest.raises(SettingError, match=r"target\.source is embedded:smollm2-135m"):
        train_drafter(
            settings.override("target.source=embedded:smollm2-135m"),
            output=tmp_path / "drafter",
            rollouts=line.rollouts / "train",
        )
    assert not (tmp_path / "training").exists()
    with FileLock(tmp_path / ".training.lock"), pytest.raises(SettingError, match="another command is training in"):
        train_drafter(settings, output=tmp_path / "drafter", rollouts=line.rollouts / "train")


def test_a_mistake_found_by_a_worker_reaches_the_caller(line: Line) -> None:
    with pytest.raises(SettingError, match=r"drafter\.feature_layers"):
        line.train("layers", "drafter.feature_layers=[1,9]")
