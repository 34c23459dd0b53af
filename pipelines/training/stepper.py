"""One optimizer step: from its number to the scalars of its log record. Everything random in it is a function of that
number, so a resumed run repeats it exactly."""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipelines.training.engine import DrafterEngine, add_up
from pipelines.training.feature_source import feature_source, micro_batch, request_of
from pipelines.training.job import WorkerJob
from tierspec.errors import SettingError
from tierspec.models import Target
from tierspec.training.data import DataOrder, sample_anchors
from tierspec.training.monitors import Monitors
from tierspec.training.trainee import Trainee
from tierspec.training.weighting import base_schedule


@dataclass(frozen=True)
class StepResult:
    """`tokens`: tokens of all sequences of the step, prompts included, on all ranks; `seconds`: of this rank."""

    scalars: dict[str, float]
    tokens: int
    seconds: float


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class Stepper:
    """The data of a run, its target features, and the steps over them; all ranks step together."""

    def __init__(
        self,
        job: WorkerJob,
        trainee: Trainee,
        engine: DrafterEngine,
        target: Target,
        rank: int,
        world_size: int,
        first_step: int,
    ) -> None:
        """`first_step`: the optimizer step that the run begins or goes on with."""
        self._settings, self._training = job.settings, job.settings.training
        training = self._training
        self._samples, self._seed = job.samples, job.settings.run.seed
        self._trainee, self._engine = trainee, engine
        self._rank, self._world = rank, world_size
        lengths = [len(sample.token_ids) for sample in job.samples]
        self._order = DataOrder(lengths, world_size * training.accumulation * training.batch_sequences, self._seed)
        all_epochs = training.epochs * self._order.steps_per_epoch
        self.total_steps = min(all_epochs, training.max_steps or all_epochs)
        self._schedule_sum = float(base_schedule(training.objective, training.depth).sum())
        steps = range(first_step, self.total_steps)
        self._features = feature_source(job, target, trainee.feature_layers, rank, world_size, steps)

    def run(self, step: int, rate: float) -> StepResult:
        """The optimizer step `step` (0-based) at a learning rate.

        Raises:
            SettingError: the loss is not finite.
        """
        began = time.perf_counter()
        chosen = self._order.samples(step)
        samples = [self._samples[index] for index in chosen]
        blocks = sum(min(self._training.anchors, sample.num_anchors) for sample in samples)
        divisor = self._engine.loss_divisor(blocks * self._schedule_sum)
        losses, monitors, feature_s = [], [], 0.0
        norms: dict[str, float] = {}
        for micro in range(self._training.accumulation):
            index = step * self._training.accumulation + micro
            first, numbers = micro_batch(self._order, self._settings, index, self._rank, self._world)
            part = [self._samples[number] for number in numbers]
            anchors = [
                sample_anchors(sample, self._training.anchors, (self._seed, step, first + i))
                for i, sample in enumerate(part)
            ]
            before = time.perf_counter()
            features = self._features([request_of(*pair) for pair in zip(numbers, part, strict=True)])
            feature_s += time.perf_counter() - before
            batch = self._trainee.collate(part, features, anchors, _seed_of(self._seed, step, first))
            loss, of_batch = self._engine.forward_backward(batch, divisor)
            losses.append(loss.double())
            monitors.append(of_batch.sums)
            norms = self._engine.step(rate)

        sums = add_up(torch.stack(monitors).sum(0), self._world)
        mean_loss = float(add_up(torch.stack(losses).sum(), self._world)) / self._world
        if not math.isfinite(mean_loss):
            raise SettingError(
                f"training.learning_rate is {self._training.learning_rate}: the loss is not finite at step {step + 1}; "
                "lower it"
            )
        seconds = time.perf_counter() - began
        tokens = sum(len(sample.token_ids) for sample in samples)
        scalars: dict[str, Any] = {
            "loss": mean_loss,
            **Monitors(sums).scalars(),
            "learning_rate": rate,
            **{f"gradient_norm/{name}": norm for name, norm in norms.items()},
            **{f"state_gradient_norm/{name}": norm for name, norm in self._trainee.take_gradient_norms().items()},
            "tokens_per_s": tokens / seconds,
            "step_seconds": seconds,
            "feature_seconds": feature_s,
        }
        return StepResult(scalars, tokens, seconds)
