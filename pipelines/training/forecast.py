"""What a training run will need: its sizes, and its time from a few measured steps."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from pipelines.training.sizes import run_sizes
from tierspec.config import Settings, TrainingSettings
from tierspec.models import ModelConfig
from tierspec.models.loading import load_target, load_tokenizer, resolve_source
from tierspec.models.weights import has_weights, read_config
from tierspec.threads import use_threads
from tierspec.training.data import DataOrder, Sample, sample_anchors
from tierspec.training.families import build_trainee
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.optimizer import GroupClippedAdamW
from tierspec.training.trainee import Trainee

_MEASURED_STEPS = 4
_GIB = 2**30


def forecast(settings: Settings, samples: Sequence[Sample]) -> dict[str, Any]:
    """Measures a few steps of one worker in this process and extrapolates; nothing is written. A target directory that
    holds no weights yet is not measured.

    Returns:
        target; drafter_parameters, target_parameters; samples, tokens (prompts included) and response_tokens of the
        corpus; steps_per_epoch and steps, the latter as the budget allows; memory_gib per worker by part; disk_gib;
        workers; and `measured`, None without weights, else: threads, vocabulary_coverage, process_gib,
        feature_tokens_per_s, step_seconds without features, and seconds of the whole run, for streamed features the
        most it can be: as if they were not computed beside the steps.

    Raises:
        SettingError: an unusable target, or settings that do not fit it.
    """
    training, path = settings.training, resolve_source(settings.target.source)
    sizes = run_sizes(settings, ModelConfig.from_hf(read_config(path)), load_tokenizer(path), samples)
    measured, steps = None, sizes.steps
    if has_weights(path):
        measured = _measured(settings, samples)
        feature_seconds = sizes.tokens / sizes.steps_per_epoch / training.workers / measured["feature_tokens_per_s"]
        step_seconds = measured["step_seconds"] * training.accumulation
        seconds_of = RunClock(step_seconds, feature_seconds, sizes.steps_per_epoch, sizes.kept_share)
        if training.max_minutes:
            steps = seconds_of.steps_within(training.max_minutes * 60, steps)
        measured["seconds"] = seconds_of(steps)
    return {
        "target": settings.target.source,
        "drafter_parameters": sizes.drafter_parameters,
        "target_parameters": sizes.target_parameters,
        "samples": sizes.samples,
        "tokens": sizes.tokens,
        "response_tokens": sizes.response_tokens,
        "steps_per_epoch": sizes.steps_per_epoch,
        "steps": steps,
        "memory_gib": {part: size / _GIB for part, size in sizes.memory_bytes.items()},
        "disk_gib": sizes.disk_bytes / _GIB,
        "workers": training.workers,
        "measured": measured,
    }


def render_forecast(expected: dict[str, Any]) -> str:
    """The forecast as lines of text."""
    memory = ", ".join(f"{part} {gib:.2f}" for part, gib in expected["memory_gib"].items())
    epochs, measured = expected["steps"] / expected["steps_per_epoch"], expected["measured"]
    lines = {
        "drafter": f"{expected['drafter_parameters'] / 1e6:.1f}M parameters for {expected['target']} "
        f"({expected['target_parameters'] / 1e6:,.0f}M)",
        "data": f"{expected['samples']:,} samples, {expected['tokens']:,} tokens, "
        f"{expected['response_tokens']:,} of them in responses",
        "steps": f"{expected['steps']:,} ({epochs:.1f} epochs of {expected['steps_per_epoch']:,})",
        "memory": f"about {sum(expected['memory_gib'].values()):.2f} GiB per worker ({memory}) beside activations",
        "disk": f"{expected['disk_gib']:.2f} GiB",
    }
    if measured is None:
        lines["time"] = "not measured: the target's directory holds no weights"
    else:
        lines["drafter"] += f", its vocabulary covers {100 * measured['vocabulary_coverage']:.1f} % of the tokens"
        lines["memory"] += f"; the measured process holds {measured['process_gib']:.2f} GiB"
        lines["time"] = (
            f"about {_duration(measured['seconds'])} with {expected['workers']} workers of {measured['threads']} "
            f"threads: {measured['step_seconds']:.3f} s per step, target features at "
            f"{measured['feature_tokens_per_s']:,.0f} tokens/s"
        )
    return "\n".join(f"{name + ':':9}{line}" for name, line in lines.items())


@dataclass(frozen=True)
class RunClock:
    """Seconds that the first n steps take: every step, and the target's features of what is not kept from the first
    epoch, a share `kept` of the samples."""

    step_seconds: float
    feature_seconds: float
    steps_per_epoch: int
    kept: float

    def __call__(self, steps: int) -> float:
        first = min(steps, self.steps_per_epoch)
        fresh = first + (steps - first) * (1.0 - self.kept)
        return steps * self.step_seconds + fresh * self.feature_seconds

    def steps_within(self, seconds: float, most: int) -> int:
        """The largest number of steps, at most `most` and at least one, that takes no longer."""
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self(middle) <= seconds else (low, middle - 1)
        return low


def _measured(settings: Settings, samples: Sequence[Sample]) -> dict[str, Any]:
    training, place = settings.training, settings.target
    threads = use_threads(training.threads, processes=training.workers)
    target = load_target(place.source, dtype=place.dtype, device=place.device, numerics=place.numerics)
    trainee, coverage = build_trainee(settings, target, samples)
    features = TargetFeatures(
        target.decoder,
        trainee.feature_layers,
        max_length=training.max_length,
        with_normaliser=training.objective.verification == "rejection",
    )
    order = DataOrder([len(s.token_ids) for s in samples], training.batch_sequences, settings.run.seed)
    rate, step_seconds = _measure(trainee, features, order, samples, training, target.decoder.device)
    return {
        "threads": threads,
        "vocabulary_coverage": coverage,
        "process_gib": psutil.Process().memory_info().rss / _GIB,
        "feature_tokens_per_s": rate,
        "step_seconds": step_seconds,
    }


def _measure(
    trainee: Trainee,
    features: TargetFeatures,
    order: DataOrder,
    samples: Sequence[Sample],
    training: TrainingSettings,
    device: torch.device,
) -> tuple[float, float]:
    """Tokens per second of the target's features, and seconds of a forward, backward and update of one batch."""
    optimizer = GroupClippedAdamW(trainee.parameter_groups(), training)
    rates, seconds = [], []
    for step in range(_MEASURED_STEPS):
        chosen = order.samples(step)
        part = [samples[index] for index in chosen]
        anchors = [sample_anchors(sample, training.anchors, (step, i)) for i, sample in enumerate(part)]
        tokens = sum(len(sample.token_ids) for sample in part)
        began = time.perf_counter()
        requests = [FeatureRequest(i, s.token_ids, s.first_anchor, s.greedy) for i, s in zip(chosen, part, strict=True)]
        found = features(requests)
        _settle(device)
        rates.append(tokens / (time.perf_counter() - began))
        began = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = trainee(trainee.collate(part, found, anchors))
        loss.backward()
        optimizer.step()
        _settle(device)
        seconds.append(time.perf_counter() - began)
    trainee.take_gradient_norms()
    return statistics.median(rates[1:]), statistics.median(seconds[1:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} seconds"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes}:{rest:02} minutes"
