"""What every training worker runs: frozen target, drafter in a DeepSpeed engine, one loop over optimizer steps."""

import math
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch

from pipelines.training.engine import DrafterEngine, Progress, add_up, agree
from pipelines.training.environment import prepare_process
from pipelines.training.records import RunLog
from tierspec.artifacts import atomic_directory, atomic_write_json, require_disk
from tierspec.config import Settings
from tierspec.drafters.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Drafter, embedding_sha256, save_eagle3
from tierspec.errors import SettingError
from tierspec.models.loading import load_target
from tierspec.training.data import DataOrder, Sample, sample_anchors, token_counts
from tierspec.training.eagle3 import Eagle3Trainee
from tierspec.training.features import TargetFeatures
from tierspec.training.monitors import Monitors
from tierspec.training.objective import base_schedule
from tierspec.training.optimizer import learning_rate
from tierspec.training.walk import walk

BEST, LOG, STOP_FILE, METRICS = "best", "metrics.jsonl", "stop", "metrics.json"
INFERENCE, PROVENANCE = "inference", ("run.yaml", "command.txt", "versions.json")
_HELDOUT_CACHE_BYTES = 2**30
_STATE_BYTES_PER_PARAMETER = 14  # fp32 weight and two moments, bf16 weight for inference


@dataclass(frozen=True)
class WorkerJob:
    """What the driver tells a worker. `state`: folder of the training state, on storage that all workers share."""

    settings: Settings
    samples: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    state: Path


def run_worker(config: dict[str, Any]) -> None:
    """`train_loop_per_worker`; `config` holds a `WorkerJob` under "job"."""
    TrainingRun(config["job"]).run()


class TrainingRun:
    """One worker's life. All ranks step, evaluate, save and report together."""

    def __init__(self, job: WorkerJob) -> None:
        settings = job.settings
        self._threads = prepare_process(settings)
        context = ray.train.get_context()
        self._rank, self._world = context.get_world_rank(), context.get_world_size()
        self._job, self._training = job, settings.training

        place = settings.target
        target = load_target(place.source, dtype=place.dtype, device=place.device, numerics=place.numerics)
        self._decoder = decoder = target.decoder
        counts = token_counts(job.samples, decoder.config.vocab_size)
        self._config = Eagle3Config.for_target(
            decoder.config,
            feature_layers=settings.drafter.feature_layers,
            draft_vocab_size=settings.drafter.draft_vocab_size,
            max_draft_tokens=self._training.depth,
            source=target.source,
            embedding_sha256=embedding_sha256(decoder.embedding),
        )
        self._vocabulary = DraftVocabulary.most_frequent(counts, self._config.draft_vocab_size)
        self._coverage = self._vocabulary.coverage(counts)
        self._trainee = Eagle3Trainee(
            self._config,
            self._vocabulary,
            decoder,
            self._training.objective,
            depth=self._training.depth,
            precision=self._training.precision,
            seed=settings.run.seed,
        )
        if self._training.initialize_from_target:
            self._trainee.initialize_from_target(decoder)
        if self._rank == 0:
            parameters = sum(p.numel() for p in self._trainee.parameters())
            needed = _STATE_BYTES_PER_PARAMETER * parameters * (self._training.keep_last + 2)
            require_disk(job.state, needed, "run.root", what="jobs.train")
        self._engine = DrafterEngine(self._trainee, self._training, self._world)
        self._features = self._target_features(
            2**20 * self._training.feature_cache_mb if self._training.epochs > 1 else 0
        )
        self._heldout_features = self._target_features(_HELDOUT_CACHE_BYTES)

        per_step = self._world * self._training.accumulation * self._training.batch_sequences
        self._order = DataOrder([len(s.token_ids) for s in job.samples], per_step, settings.run.seed)
        total = self._training.epochs * self._order.steps_per_epoch
        self._total = min(total, self._training.max_steps or total)
        self._schedule_sum = float(base_schedule(self._training.objective, self._training.depth).sum())
        self._heldout: dict[str, Any] = {}
        self._latest: dict[str, float] = {}

    def run(self) -> None:
        """Train from the last checkpoint, or from the start, to the end of the budget or until asked to stop."""
        progress = self._resume()
        log = self._open_log(progress)
        every = (self._training.checkpoint_every, self._training.evaluate_every)
        stopped = self._stop_requested(progress)
        while self._share_done(progress) < 1.0 and not stopped:
            self._step(progress, log)
            stopped = self._stop_requested(progress)
            save, evaluate = (n > 0 and progress.step % n == 0 for n in every)
            if (save or evaluate) and self._share_done(progress) < 1.0 and not stopped:
                self._evaluate(progress, log)
                if save:
                    self._save(progress)
        finished = self._share_done(progress) >= 1.0
        if finished:
            self._evaluate(progress, log)
        self._save(progress, finished=finished)
        if log is not None:
            log.close()

    def _target_features(self, cache_bytes: int) -> TargetFeatures:
        layers, length = self._config.feature_layers, self._training.max_length
        return TargetFeatures(self._decoder, layers, max_length=length, cache_bytes=cache_bytes)

    def _resume(self) -> Progress:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return Progress()
        with checkpoint.as_directory() as directory:
            return self._engine.load(Path(directory))

    def _open_log(self, progress: Progress) -> RunLog | None:
        if self._rank:
            return None
        log = RunLog(self._job.state / LOG, self._job.state / "tensorboard", progress.step)
        log.write(
            "start",
            progress.step,
            {"total_steps": self._total, "threads": self._threads, "workers": self._world, "pid": os.getpid()},
        )
        return log

    def _share_done(self, progress: Progress) -> float:
        by_steps = progress.step / self._total
        minutes = self._training.max_minutes
        return max(by_steps, min(1.0, progress.elapsed_s / 60 / minutes)) if minutes else by_steps

    def _stop_requested(self, progress: Progress) -> bool:
        """Whether the stop file is there; all ranks answer alike, and take over the longest elapsed time of any."""
        asked, progress.elapsed_s = agree(
            [float((self._job.state / STOP_FILE).exists()), progress.elapsed_s], self._decoder.device, self._world
        )
        return asked > 0

    def _step(self, progress: Progress, log: RunLog | None) -> None:
        began = time.perf_counter()
        accumulation, size = self._training.accumulation, self._training.batch_sequences
        chosen = self._order.samples(progress.step)
        samples = [self._job.samples[index] for index in chosen]
        blocks = sum(min(self._training.anchors, sample.num_anchors) for sample in samples)
        divisor = self._engine.loss_divisor(blocks * self._schedule_sum)
        rate = learning_rate(self._share_done(progress) + 0.5 / self._total, self._training)

        loss = torch.zeros((), dtype=torch.float64, device=self._decoder.device)
        monitors: Monitors | None = None
        feature_s = 0.0
        for micro in range(accumulation):
            first = (micro * self._world + self._rank) * size
            part = range(first, first + size)
            anchors = [
                sample_anchors(samples[i], self._training.anchors, (self._job.settings.run.seed, progress.step, i))
                for i in part
            ]
            before = time.perf_counter()
            features = [self._features(s.sample_id, s.token_ids, s.first_anchor) for s in (samples[i] for i in part)]
            feature_s += time.perf_counter() - before
            batch = self._trainee.collate([samples[i] for i in part], features, anchors)
            micro_loss, micro_monitors = self._engine.forward_backward(batch, divisor)
            loss += micro_loss.double()
            monitors = micro_monitors if monitors is None else monitors + micro_monitors
            norms = self._engine.step(rate)

        assert monitors is not None
        sums = add_up(monitors.sums, self._world)
        loss = add_up(loss, self._world) / self._world
        if not math.isfinite(loss):
            raise SettingError(
                f"training.learning_rate is {self._training.learning_rate}: the loss is not finite at step "
                f"{progress.step + 1}; lower it"
            )
        seconds = time.perf_counter() - began
        tokens = sum(len(sample.token_ids) for sample in samples)
        progress.step, progress.tokens = progress.step + 1, progress.tokens + tokens
        progress.elapsed_s += seconds
        share = self._share_done(progress)
        self._latest = {
            "loss": float(loss),
            **Monitors(sums).scalars(),
            "learning_rate": rate,
            **{f"gradient_norm/{name}": norm for name, norm in norms.items()},
            **{f"state_gradient_norm/{name}": n for name, n in self._trainee.take_gradient_norms().items()},
            "tokens_per_s": tokens / seconds,
            "step_seconds": seconds,
            "feature_seconds": feature_s,
            "seconds_left": progress.elapsed_s * (1 - share) / share,
        }
        if log is not None:
            log.write("step", progress.step, self._latest)

    def _evaluate(self, progress: Progress, log: RunLog | None) -> None:
        """Walked accept length of the weights as they are; the best ones are kept for the final artifact."""
        weights, head = self._engine.weights()
        if self._rank:
            return
        began = time.perf_counter()
        if self._job.heldout:
            drafter = Eagle3Drafter(self._config, weights, self._vocabulary, self._decoder)
            result = walk(drafter, self._heldout_features, self._job.heldout, self._training.depth)
            self._heldout = {
                "heldout_step": progress.step,
                "accept_len": result.accept_len,
                "rounds": result.rounds,
                "per_position_acceptance": result.per_position_acceptance,
            }
            if log is not None:
                log.write("heldout", progress.step, {**self._heldout, "seconds": time.perf_counter() - began})
        if not self._job.heldout or result.accept_len > progress.best_accept_len:
            progress.best_step = progress.step
            progress.best_accept_len = result.accept_len if self._job.heldout else 0.0
            with atomic_directory(self._job.state / BEST) as directory:
                save_eagle3(directory, self._config, weights, self._vocabulary, head)
                atomic_write_json(directory / METRICS, self._metrics(progress))

    def _metrics(self, progress: Progress) -> dict[str, Any]:
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "vocabulary_coverage": self._coverage,
            "training": self._latest,
            "heldout": self._heldout,
        }

    def _save(self, progress: Progress, *, finished: bool = False) -> None:
        """Every rank saves and reports; the first adds the drafter for inference, where it came from, and metrics."""
        directory = Path(tempfile.mkdtemp(prefix="tierspec-checkpoint-"))
        try:
            self._engine.save(directory, progress)
            weights, head = self._engine.weights()
            if self._rank == 0:
                (directory / INFERENCE).mkdir()
                save_eagle3(directory / INFERENCE, self._config, weights, self._vocabulary, head)
                atomic_write_json(directory / METRICS, self._metrics(progress))
                for name in PROVENANCE:
                    if (self._job.state / name).exists():
                        shutil.copy(self._job.state / name, directory / name)
            outcome = {
                "step": progress.step,
                "tokens": progress.tokens,
                "elapsed_s": progress.elapsed_s,
                "total_steps": self._total,
                "threads": self._threads,
                "coverage": self._coverage,
                "best_step": progress.best_step,
                "finished": finished,
            }
            ray.train.report(outcome, checkpoint=ray.train.Checkpoint.from_directory(str(directory)))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
