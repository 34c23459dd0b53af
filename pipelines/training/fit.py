"""The workers of a training run, and what went wrong with them."""

import threading
from collections.abc import Callable
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError

from pipelines.cluster import named_address, worker_gpus
from pipelines.training.job import CHECKPOINTS, LOG, STOP_FILE, WorkerJob
from pipelines.training.records import ProgressBar
from pipelines.training.worker import run_worker
from tierspec.config import Settings
from tierspec.errors import RunFailed, SettingError

Stop = Callable[[], bool]
_POLL_S = 0.2


def fit(job: WorkerJob, stop: Stop) -> dict[str, Any]:
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

    def run() -> None:
        try:
            results.append(trainer.fit())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True, name="ray-train")
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
