"""The training stage: rollouts in, a drafter out, and a state from which an interrupted run goes on."""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipelines.cluster import ray_session
from pipelines.training.checkpoints import drop_unregistered, is_damaged
from pipelines.training.fit import Stop, fit
from pipelines.training.identity import claim_state
from pipelines.training.job import (
    BEST,
    CHECKPOINTS,
    LOG,
    METRICS,
    PAGE,
    PROVENANCE,
    RESULT,
    SAMPLE,
    STOP_FILE,
    WorkerJob,
)
from pipelines.training.plan import TrainingPlan, plan_training
from pipelines.training.records import read_records
from tierspec.artifacts import atomic_directory, atomic_write_json, atomic_write_text, read_object, run_directory
from tierspec.config import Settings
from tierspec.drafters import read_drafter
from tierspec.errors import ArtifactError, SettingError
from tierspec.evaluation.training_page import render_training_page


def train_drafter(
    settings: Settings,
    *,
    output: Path,
    rollouts: Path | None = None,
    heldout: Path | None = None,
    stop: Stop = lambda: False,
) -> dict[str, Any]:
    """Train the drafter of `settings` on the rollouts of a directory; `output` is complete when it is finished.

    `output` gets the drafter (config.json, model.safetensors) of the evaluation with the best held-out accept length,
    metrics.json, metrics.jsonl (every step), training.html and result.json, whose content is returned. The state is
    kept beside it, in `training`: an interrupted run goes on from its last checkpoint, bit for bit as if it had never
    stopped, and one with a larger budget goes on training (its learning rate follows the larger budget from there on);
    a finished one is not repeated.

    Args:
        rollouts: by default `rollouts/train` of the run.
        heldout: rollouts that never train; by default the folder `heldout` beside `rollouts`, or if that holds none a
            few of the training rollouts, which then do not train.
        stop: polled; once true, the workers save after the step at hand, and no drafter is written.

    Raises:
        SettingError: see `plan_training`; an unusable target; too little disk; another command that trains here.
        RunFailed: a worker was lost.
    """
    plan = plan_training(settings, output=output, rollouts=rollouts, heldout=heldout)
    if (finished := _finished_result(plan, settings)) is not None:
        return finished
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(plan.output.parent / ".training.lock", timeout=0):
            return _train(plan, settings, stop)
    except Timeout as error:
        raise SettingError(f"run.name: another command is training in {plan.output.parent}") from error


def _train(plan: TrainingPlan, settings: Settings, stop: Stop) -> dict[str, Any]:
    training, output = settings.training, plan.output
    claim_state(plan.state, plan.identity, anew=training.overwrite and is_damaged(plan.state / CHECKPOINTS))
    (plan.state / STOP_FILE).unlink(missing_ok=True)
    drop_unregistered(plan.state / CHECKPOINTS)
    _copy(PROVENANCE, output, plan.state)

    began = time.monotonic()
    with ray_session(settings):
        features = run_directory(settings, "features").absolute()
        job = WorkerJob(
            settings, plan.samples, plan.heldout, plan.rollouts.template_hash, plan.state.absolute(), features
        )
        outcome = fit(job, stop)
    result = {
        **outcome,
        "output": str(output),
        "target": plan.rollouts.target,
        "samples": len(plan.samples),
        "response_tokens": sum(len(sample.response_ids) for sample in plan.samples),
        "cut": plan.rollouts.cut,
        "dropped": plan.rollouts.dropped,
        "heldout": plan.heldout_source,
        "heldout_prompts": len(plan.heldout),
        "tokens_per_s": round(outcome["tokens"] / max(outcome["elapsed_s"], 1e-9), 1),
        "workers": training.workers,
        "wall_s": round(time.monotonic() - began, 1),
    }
    if not outcome["finished"]:
        return result | {"ended_early": "stopped"}
    best = read_object(plan.state / BEST / METRICS)
    result |= {
        "accept_len": best["heldout"].get("accept_len"),
        "per_position_acceptance": best["heldout"].get("per_position_acceptance"),
        "train_accept_len": best["training"].get("accept_len"),
        "loss": best["training"].get("loss"),
    }
    _publish(plan, result, settings)
    return result


def _finished_result(plan: TrainingPlan, settings: Settings) -> dict[str, Any] | None:
    """The result of a finished run of the same identity and budget, if that is what the output holds, whole."""
    if not (plan.output / RESULT).exists():
        return None
    try:
        result = read_object(plan.output / RESULT)
        read_drafter(plan.output)
    except ArtifactError:
        return None
    same = result.get("identity") == plan.identity and result.get("budget") == _budget(settings)
    return result if same else None


def _budget(settings: Settings) -> dict[str, float]:
    training = settings.training
    return {"epochs": training.epochs, "max_steps": training.max_steps, "max_minutes": training.max_minutes}


def _publish(plan: TrainingPlan, result: dict[str, Any], settings: Settings) -> None:
    """The finished drafter, all at once."""
    with atomic_directory(plan.output) as directory:
        _copy([file.name for file in (plan.state / BEST).iterdir()], plan.state / BEST, directory)
        _copy((LOG, *PROVENANCE), plan.state, directory)
        sample = read_object(directory / SAMPLE) if (directory / SAMPLE).exists() else None
        page = render_training_page(result, read_records(directory / LOG), sample)
        atomic_write_text(directory / PAGE, page)
        atomic_write_json(directory / RESULT, {**result, "identity": plan.identity, "budget": _budget(settings)})


def _copy(names: Iterable[str], source: Path, destination: Path) -> None:
    for name in names:
        if (source / name).exists():
            shutil.copy(source / name, destination / name)
