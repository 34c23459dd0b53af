"""The training stage: rollouts in, a drafter out, and a state from which an interrupted run goes on."""

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError

from pipelines.cluster import named_address, ray_session, worker_gpus
from pipelines.rollouts.directory import MANIFEST
from pipelines.training.identity import claim_state, refuse_changes, training_identity
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
from pipelines.training.records import ProgressBar, read_records
from pipelines.training.trackers import check_trackers
from pipelines.training.worker import run_worker
from tierspec.artifacts import (
    atomic_directory,
    atomic_write_json,
    atomic_write_text,
    read_object,
    remove_directory,
    run_directory,
)
from tierspec.config import Settings
from tierspec.drafters import read_drafter
from tierspec.errors import ArtifactError, RunFailed, SettingError
from tierspec.evaluation.training_page import render_training_page
from tierspec.training.acceptance import check_sampling_known
from tierspec.training.data import Rollouts, Sample, read_rollouts

Stop = Callable[[], bool]
_POLL_S = 0.2
_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's


@dataclass(frozen=True)
class TrainingPlan:
    """What a run trains on and where it goes, checked. `rollouts` is the whole corpus, `samples` what is trained on;
    `heldout_source` says where the held-out samples come from."""

    rollouts: Rollouts
    samples: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    heldout_source: str
    output: Path
    identity: dict[str, Any]

    @property
    def state(self) -> Path:
        """Folder of the training state."""
        return self.output.parent / "training"


def plan_training(
    settings: Settings, *, output: Path, rollouts: Path | None = None, heldout: Path | None = None
) -> TrainingPlan:
    """Read and check everything that a run needs, and write nothing; arguments as in `train_drafter`.

    Raises:
        SettingError: bad rollouts, or of another target; rollouts that do not say what the objective needs; held-out
            rollouts that are all too short; a training state of other settings.
    """
    check_trackers(settings)
    directory = rollouts or run_directory(settings, "rollouts") / "train"
    corpus = read_rollouts(directory, settings.training.max_length, settings.target.source)
    if heldout is None and any((directory.parent / "heldout").glob("*.parquet")):
        heldout = directory.parent / "heldout"
    if not _choices_are_known(directory, settings):
        corpus = replace(corpus, samples=tuple(replace(sample, greedy=False) for sample in corpus.samples))
    samples, held_out, source = _split(corpus, heldout, settings)
    if settings.training.objective.verification == "keyed":
        check_sampling_known((*samples, *held_out))
    identity = training_identity(settings, samples)
    plan = TrainingPlan(corpus, samples, held_out, source, output, identity)
    if not settings.training.overwrite:
        refuse_changes(plan.state, identity)
    return plan


def _choices_are_known(rollouts: Path, settings: Settings) -> bool:
    """Whether greedy rollouts hold, token for token, what the target of `settings` would choose in training."""
    manifest, target = rollouts / MANIFEST, settings.target
    if not manifest.is_file() or target.device != "cpu" or target.numerics == "fast":
        return False
    made_with = read_object(manifest).get("identity")
    wanted = {"target.dtype": target.dtype, "target.device": "cpu"}
    return (
        isinstance(made_with, dict)
        and all(made_with.get(name) == value for name, value in wanted.items())
        and made_with.get("target.numerics") in ("auto", "invariant")
    )


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
        SettingError: see `plan_training`; an unusable target; too little disk.
    """
    training = settings.training
    plan = plan_training(settings, output=output, rollouts=rollouts, heldout=heldout)
    if (finished := _finished_result(plan, settings)) is not None:
        return finished
    claim_state(plan.state, plan.identity, anew=training.overwrite and _is_damaged(plan.state / CHECKPOINTS))
    (plan.state / STOP_FILE).unlink(missing_ok=True)
    _drop_unfinished_checkpoints(plan.state / CHECKPOINTS)
    _copy(PROVENANCE, output, plan.state)

    began = time.monotonic()
    with ray_session(settings):
        features = run_directory(settings, "features").absolute()
        job = WorkerJob(
            settings, plan.samples, plan.heldout, plan.rollouts.template_hash, plan.state.absolute(), features
        )
        outcome = _fit(job, stop)
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


def _split(
    corpus: Rollouts, heldout: Path | None, settings: Settings
) -> tuple[tuple[Sample, ...], tuple[Sample, ...], str]:
    """Training samples, held-out samples, and where the latter came from."""
    count = settings.training.heldout_prompts
    if not count:
        return corpus.samples, (), ""
    if heldout is not None:
        found = walkable(read_heldout(heldout, corpus, settings), settings, str(heldout))
        step = max(1, len(found) // count)
        return corpus.samples, found[::step][:count], str(heldout)
    count = min(count, len(corpus.samples) // 2)
    ranked = sorted(
        walkable(corpus.samples, settings, "the rollouts"), key=lambda s: hashlib.sha256(s.sample_id.encode()).digest()
    )
    held = {sample.sample_id for sample in ranked[:count]}
    kept = tuple(sample for sample in corpus.samples if sample.sample_id not in held)
    return (
        kept,
        tuple(sample for sample in corpus.samples if sample.sample_id in held),
        "split of the training rollouts",
    )


def read_heldout(directory: Path, corpus: Rollouts, settings: Settings) -> tuple[Sample, ...]:
    """Held-out answers of the target that the corpus is of, with the same chat template."""
    return read_rollouts(directory, settings.training.max_length, corpus.target, corpus.template_hash).samples


def walkable(samples: Sequence[Sample], settings: Settings, source: str) -> tuple[Sample, ...]:
    """The samples along which a drafter can be walked: those with a whole round of drafts.

    Raises:
        SettingError: there is none.
    """
    depth = settings.training.depth
    if long_enough := tuple(sample for sample in samples if len(sample.response_ids) > depth):
        return long_enough
    raise SettingError(
        f"training.heldout_prompts: no answer in {source} has more than training.depth = {depth} tokens; make longer "
        "ones, or set it to 0"
    )


def _is_damaged(checkpoints: Path) -> bool:
    try:
        _drop_unfinished_checkpoints(checkpoints)
    except ArtifactError:
        return True
    return False


def _drop_unfinished_checkpoints(directory: Path) -> None:
    """Remove what a killed run had not yet registered: Ray knows only registered checkpoints, and would keep the others
    for ever.

    Raises:
        ArtifactError: the register is damaged, or gone though it must have been there.
    """
    snapshot = directory / _SNAPSHOT
    there = [path for path in directory.glob("checkpoint_*") if path.is_dir()]
    names: set[str] = set()
    if snapshot.exists() or len(there) > 1:
        try:
            names = {checkpoint["checkpoint_dir_name"] for checkpoint in read_object(snapshot)["checkpoint_results"]}
        except (ArtifactError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{snapshot} does not list the checkpoints beside it; training.overwrite=true trains anew"
            ) from error
    for path in there:
        if path.name not in names:
            remove_directory(path)


def _fit(job: WorkerJob, stop: Stop) -> dict[str, Any]:
    """Run the workers. Ray's `fit` would take over SIGINT in the main thread, so it gets one of its own."""
    training = job.settings.training
    there = ray.cluster_resources().get("GPU", 0.0)
    gpus = worker_gpus(job.settings, "training.workers", training.workers, there)
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=training.workers, use_gpu=gpus > 0, resources_per_worker=_worker_resources(job.settings)
        ),
        run_config=RunConfig(
            name=CHECKPOINTS,
            storage_path=str(job.state),
            failure_config=FailureConfig(max_failures=training.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=training.keep_last),
        ),
    )
    results: list[ray.train.Result] = []
    failures: list[BaseException] = []

    def fit() -> None:
        try:
            results.append(trainer.fit())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=fit, daemon=True, name="ray-train")
    thread.start()
    bar = ProgressBar(job.state / LOG)
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            bar.poll()
            if stop():
                (job.state / STOP_FILE).touch()
    finally:
        bar.close()
    if failures:
        raise _mistake(failures[0]) from failures[0]
    return dict(results[0].metrics or {})


def _worker_resources(settings: Settings) -> dict[str, float]:
    """What one worker reserves: a CPU per thread on a cluster, half a CPU on a local Ray, whose count is nominal."""
    training = settings.training
    cpus = float(training.threads or 1) if named_address(settings) else 0.5
    return {"CPU": cpus} | ({training.node: 1.0} if training.node else {})


def _mistake(error: BaseException) -> BaseException:
    """The user's mistake behind a failed run, if it is one, or the loss of a worker."""
    if isinstance(error, WorkerGroupError):
        causes = [getattr(failure, "cause", failure) for failure in error.worker_failures.values()]
        for cause in causes:
            if isinstance(cause, SettingError):
                return cause
        if any(isinstance(cause, RayActorError) for cause in causes):
            return RunFailed(
                "a training worker was lost; the same command goes on from the last checkpoint, and "
                "training.max_failures lets it do so by itself"
            )
    return error


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
