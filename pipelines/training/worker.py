"""What every training worker runs: a frozen target, the drafter in a DeepSpeed engine, and the loop over steps."""

import os
from pathlib import Path
from typing import Any

import ray.train

from pipelines.training.engine import DrafterEngine, Progress, agree
from pipelines.training.environment import prepare_process
from pipelines.training.job import LOG, METRICS, STOP_FILE, WorkerJob
from pipelines.training.keeper import Keeper
from pipelines.training.records import RunLog
from pipelines.training.sizes import STATE_BYTES_PER_PARAMETER
from pipelines.training.stepper import Stepper
from pipelines.training.trackers import open_trackers
from tierspec.artifacts import read_object, require_disk
from tierspec.errors import SettingError
from tierspec.models.loading import load_target
from tierspec.training.data import check_token_ids
from tierspec.training.families import build_trainee
from tierspec.training.optimizer import learning_rate


def run_worker(config: dict[str, Any]) -> None:
    """`train_loop_per_worker`; `config` holds a `WorkerJob` under "job"."""
    TrainingRun(config["job"]).run()


class TrainingRun:
    """One worker's life. All ranks step, evaluate, save and report together."""

    def __init__(self, job: WorkerJob) -> None:
        self._job, self._training = job, job.settings.training
        self._threads = prepare_process(job.settings)
        context = ray.train.get_context()
        self._rank, self._world = context.get_world_rank(), context.get_world_size()
        place = job.settings.target
        target = load_target(place.source, dtype=place.dtype, device=place.device, numerics=place.numerics)
        self._device = target.decoder.device

        if target.template_hash != job.template_hash:
            raise SettingError(
                f"target.source: the chat template of {place.source} is not the one that the rollouts were made with"
            )
        check_token_ids((*job.samples, *job.heldout), target.config.vocab_size)
        trainee, self._coverage = build_trainee(job.settings, target, job.samples)
        if self._rank == 0:
            needed = STATE_BYTES_PER_PARAMETER * sum(p.numel() for p in trainee.parameters())
            require_disk(job.state, needed * (self._training.keep_last + 2), "run.root", what="jobs.train")
        engine = DrafterEngine(trainee, self._training, self._world)
        self._progress, metrics = _restored(engine)
        self._stepper = Stepper(job, trainee, engine, target, self._rank, self._world, self._progress.step)
        self._log = self._open_log() if self._rank == 0 else None
        self._keeper = Keeper(job, trainee, engine, target, self._log, metrics.get("heldout", {}))
        self._scalars: dict[str, float] = metrics.get("training", {})

    def run(self) -> None:
        """Train to the end of the budget, or until asked to stop; the state is saved in both cases."""
        progress = self._progress
        every = (self._training.checkpoint_every, self._training.evaluate_every)
        stopped = self._stop_requested()
        while self._share_done() < 1.0 and not stopped:
            self._step()
            stopped = self._stop_requested()
            save, evaluate = (n > 0 and progress.step % n == 0 for n in every)
            if (save or evaluate) and self._share_done() < 1.0 and not stopped:
                self._keeper.evaluate(progress, self._scalars)
                if save:
                    self._keeper.save(progress, self._scalars, self._report(), last=False)
        if self._share_done() >= 1.0:
            self._keeper.evaluate(progress, self._scalars)
        self._keeper.save(progress, self._scalars, self._report(), last=True)
        if self._log is not None:
            self._log.close()

    def _open_log(self) -> RunLog:
        step = self._progress.step
        log = RunLog(self._job.state / LOG, step, open_trackers(self._job.settings, self._job.state, step))
        process = {"threads": self._threads, "workers": self._world, "pid": os.getpid()}
        log.write("start", step, {"total_steps": self._stepper.total_steps, **process})
        return log

    def _step(self) -> None:
        progress = self._progress
        share = self._share_done() + 0.5 / self._stepper.total_steps
        result = self._stepper.run(progress.step, learning_rate(min(share, 1.0), self._training))
        progress.step += 1
        progress.tokens += result.tokens
        progress.elapsed_s += result.seconds
        share = self._share_done()
        left = progress.elapsed_s * (1 - share) / share
        self._scalars = result.scalars | {"budget_share": share, "seconds_left": left}
        if self._log is not None:
            self._log.write("step", progress.step, self._scalars)

    def _share_done(self) -> float:
        """Share of the budget that is spent, in steps or in minutes, whichever is more; at least 1 ends the run."""
        steps = self._progress.step / self._stepper.total_steps
        minutes = self._training.max_minutes
        return max(steps, min(1.0, self._progress.elapsed_s / 60 / minutes)) if minutes else steps

    def _stop_requested(self) -> bool:
        """Whether the stop file is there; all ranks answer alike, and take over the longest elapsed time of any."""
        values = [float((self._job.state / STOP_FILE).exists()), self._progress.elapsed_s]
        asked, self._progress.elapsed_s = agree(values, self._device, self._world)
        return asked > 0

    def _report(self) -> dict[str, Any]:
        progress = self._progress
        return {
            "step": progress.step,
            "total_steps": self._stepper.total_steps,
            "tokens": progress.tokens,
            "elapsed_s": progress.elapsed_s,
            "best_step": progress.best_step,
            "finished": self._share_done() >= 1.0,
            "vocabulary_coverage": self._coverage,
            "threads": self._threads,
        }


def _restored(engine: DrafterEngine) -> tuple[Progress, dict[str, Any]]:
    """The state of the run's last checkpoint, loaded, and the metrics kept with it; a new state if there is none."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return Progress(), {}
    with checkpoint.as_directory() as directory:
        return engine.load(Path(directory)), read_object(Path(directory) / METRICS)
