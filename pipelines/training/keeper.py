"""What a run keeps: the drafter with the best held-out accept length, and checkpoints to go on from."""

import shutil
import time
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode

from pipelines.training.engine import DrafterEngine, Progress
from pipelines.training.job import BEST, INFERENCE, METRICS, PROVENANCE, SAMPLE, WorkerJob
from pipelines.training.records import RunLog
from tierspec.artifacts import atomic_directory, atomic_write_json, temporary_directory
from tierspec.evaluation.training_page import readable_sample
from tierspec.models import Target
from tierspec.training.data import Sample
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.token_view import token_view
from tierspec.training.trainee import Trainee
from tierspec.training.walk import walk

_HELDOUT_CACHE_BYTES = 2**30
_SHOWN = -1  # key of the shown sample's features; the walk numbers its own, without choices, from 0


class Keeper:
    """All ranks call every method alike; only the first writes, apart from each rank's part of the training state."""

    def __init__(
        self,
        job: WorkerJob,
        trainee: Trainee,
        engine: DrafterEngine,
        target: Target,
        log: RunLog | None,
        measured: dict[str, Any],
    ) -> None:
        """`log`: only the first rank has one; `measured`: what a resumed run's last evaluation found."""
        self._state, self._heldout = job.state, job.heldout
        self._trainee, self._engine, self._target, self._log = trainee, engine, target, log
        self._features = TargetFeatures(
            target.decoder,
            trainee.feature_layers,
            max_length=job.settings.training.max_length,
            cache_bytes=_HELDOUT_CACHE_BYTES,
        )
        self._names = [sample.sample_id for sample in job.heldout]
        self._measured, self._resumed_at = measured, measured.get("measured_at")
        self._comparable = measured.get("samples", self._names) == self._names

    def evaluate(self, progress: Progress, scalars: dict[str, float]) -> None:
        """Walked accept length of the weights as they are; the best are kept, the latest if nothing is held out.

        What a resumed run has evaluated at this step counts; what it measured on other held-out samples does not.
        """
        if not self._comparable:
            progress.best_accept_len, self._measured, self._resumed_at, self._comparable = 0.0, {}, None, True
        if progress.step == self._resumed_at:
            return
        weights = self._engine.weights()
        if self._log is None:
            return
        began = time.perf_counter()
        accept_len = 0.0
        if self._heldout:
            drafter = self._trainee.pack(weights[0], self._target.decoder)
            result = walk(drafter, self._features, self._heldout, self._trainee.depth)
            accept_len = result.accept_len
            self._measured = {
                "measured_at": progress.step,
                "accept_len": accept_len,
                "rounds": result.rounds,
                "per_position_acceptance": result.per_position_acceptance,
            }
            self._log.write("heldout", progress.step, {**self._measured, "seconds": time.perf_counter() - began})
            self._measured["samples"] = self._names
        if not self._heldout or accept_len > progress.best_accept_len:
            progress.best_step, progress.best_accept_len = progress.step, accept_len
            with atomic_directory(self._state / BEST) as directory:
                self._trainee.save(directory, *weights)
                atomic_write_json(directory / METRICS, self._metrics(progress, scalars))
                if self._heldout and self._engine.holds_whole_weights:
                    atomic_write_json(directory / SAMPLE, self._sample(self._heldout[0]))

    def save(self, progress: Progress, scalars: dict[str, float], report: dict[str, Any], *, last: bool) -> None:
        """A checkpoint: training state, drafter, origin and metrics, written by the first rank. It is uploaded while
        the steps go on, except the last one."""
        checkpoint = None
        mode = CheckpointUploadMode.SYNC if last else CheckpointUploadMode.ASYNC
        if self._log is None:
            self._engine.save(None, progress)
        else:
            directory = temporary_directory(self._state / "checkpoint")
            weights = self._engine.save(directory, progress)
            (directory / INFERENCE).mkdir()
            self._trainee.save(directory / INFERENCE, *weights)
            atomic_write_json(directory / METRICS, self._metrics(progress, scalars))
            for name in PROVENANCE:
                if (self._state / name).exists():
                    shutil.copy(self._state / name, directory / name)
            checkpoint = ray.train.Checkpoint.from_directory(str(directory))
        ray.train.report(report, checkpoint, checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=True)

    def _sample(self, sample: Sample) -> dict[str, Any]:
        request = FeatureRequest(_SHOWN, sample.token_ids, sample.first_anchor, sample.greedy)
        (features,) = self._features([request])
        view = token_view(self._trainee, features, sample)
        return readable_sample(view, self._target.tokenizer.decode)

    def _metrics(self, progress: Progress, scalars: dict[str, float]) -> dict[str, Any]:
        position = {"step": progress.step, "tokens": progress.tokens, "elapsed_s": progress.elapsed_s}
        return {**position, "training": scalars, "heldout": self._measured}
