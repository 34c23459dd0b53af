"""What a training run will need: parameters, memory, disk, steps and time, from its settings and a few steps."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from tierspec.config import Settings, TrainingSettings
from tierspec.models import ModelConfig
from tierspec.models.loading import load_target
from tierspec.threads import use_threads
from tierspec.training.data import DataOrder, Sample, check_token_ids, sample_anchors
from tierspec.training.families import build_trainee
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.optimizer import GroupClippedAdamW
from tierspec.training.trainee import Trainee

STATE_BYTES_PER_PARAMETER = 14  # of a checkpoint: fp32 weight and two moments, bf16 weight for inference
_MEASURED_STEPS = 4
_GIB = 2**30


def forecast(settings: Settings, samples: Sequence[Sample]) -> dict[str, Any]:
    """Measures a few steps of one worker in this process and extrapolates; nothing is written.

    Returns:
        drafter_parameters, target_parameters; samples, tokens (prompts included) and response_tokens of the corpus;
        steps_per_epoch and steps, the latter as the budget allows; memory in GiB per worker by part, as `memory_gib`;
        disk_gib; feature_tokens_per_s, step_seconds without features, and seconds of the whole run, for streamed
        features the most it can be: as if they were not computed beside the steps.

    Raises:
        SettingError: an unusable target, or settings that do not fit it.
    """
    training, place = settings.training, settings.target
    threads = use_threads(training.threads, processes=training.workers)
    target = load_target(place.source, dtype=place.dtype, device=place.device, numerics=place.numerics)
    check_token_ids(samples, target.config.vocab_size)
    trainee, coverage = build_trainee(settings, target, samples)
    features = TargetFeatures(
        target.decoder,
        trainee.feature_layers,
        max_length=training.max_length,
        with_normaliser=training.objective.verification == "rejection",
    )
    order = DataOrder([len(s.token_ids) for s in samples], training.batch_sequences, settings.run.seed)
    rate, step_seconds, bytes_per_token = _measure(trainee, features, order, samples, training, target.decoder.device)

    per_step = training.workers * training.accumulation * training.batch_sequences
    tokens = sum(len(sample.token_ids) for sample in samples)
    steps_per_epoch = -(-len(samples) // per_step)
    most = min(training.epochs * steps_per_epoch, training.max_steps or training.epochs * steps_per_epoch)
    on_disk = tokens * bytes_per_token if training.features == "cached" else 0.0
    in_memory = 0.0
    if training.features == "inline" and training.epochs > 1:
        in_memory = min(training.feature_cache_mb * 2.0**20, tokens * bytes_per_token)
    kept = min(1 / training.workers, in_memory / (tokens * bytes_per_token)) if on_disk == 0 else 1.0
    feature_seconds = tokens / steps_per_epoch / training.workers / rate
    seconds_of = RunClock(step_seconds * training.accumulation, feature_seconds, steps_per_epoch, kept)
    steps = seconds_of.steps_within(training.max_minutes * 60, most) if training.max_minutes else most
    drafter = sum(p.numel() for p in trainee.parameters())
    memory = _memory(drafter, target_parameters(target.config), target.decoder.dtype.itemsize, training)
    memory["features"] = in_memory / _GIB
    return {
        "target": place.source,
        "drafter_parameters": drafter,
        "target_parameters": target_parameters(target.config),
        "vocabulary_coverage": coverage,
        "samples": len(samples),
        "tokens": tokens,
        "response_tokens": sum(len(sample.response_ids) for sample in samples),
        "workers": training.workers,
        "threads": threads,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "memory_gib": memory,
        "measured_process_gib": psutil.Process().memory_info().rss / _GIB,
        "disk_gib": (drafter * STATE_BYTES_PER_PARAMETER * (training.keep_last + 2) + on_disk) / _GIB,
        "feature_tokens_per_s": rate,
        "step_seconds": step_seconds,
        "seconds": seconds_of(steps),
    }


def render_forecast(expected: dict[str, Any]) -> str:
    """The forecast as lines of text."""
    memory = ", ".join(f"{part} {gib:.2f}" for part, gib in expected["memory_gib"].items())
    epochs = expected["steps"] / expected["steps_per_epoch"]
    lines = {
        "drafter": f"{expected['drafter_parameters'] / 1e6:.1f}M parameters for {expected['target']} "
        f"({expected['target_parameters'] / 1e6:.0f}M), its vocabulary covers "
        f"{100 * expected['vocabulary_coverage']:.1f} % of the tokens",
        "data": f"{expected['samples']} samples, {expected['tokens']:,} tokens, "
        f"{expected['response_tokens']:,} of them in responses",
        "steps": f"{expected['steps']:,} ({epochs:.1f} epochs of {expected['steps_per_epoch']:,})",
        "memory": f"about {sum(expected['memory_gib'].values()):.2f} GiB per worker ({memory}) beside activations; "
        f"the measured process holds {expected['measured_process_gib']:.2f} GiB",
        "disk": f"{expected['disk_gib']:.2f} GiB",
        "time": f"about {_duration(expected['seconds'])} with {expected['workers']} workers of {expected['threads']} "
        f"threads: {expected['step_seconds']:.3f} s per step, target features at "
        f"{expected['feature_tokens_per_s']:,.0f} tokens/s",
    }
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


def _measure(
    trainee: Trainee,
    features: TargetFeatures,
    order: DataOrder,
    samples: Sequence[Sample],
    training: TrainingSettings,
    device: torch.device,
) -> tuple[float, float, float]:
    """Tokens per second of the target's features, seconds of a forward, backward and update of one batch, and bytes of
    features per token."""
    optimizer = GroupClippedAdamW(trainee.parameter_groups(), training)
    rates, seconds, sizes = [], [], []
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
        sizes.append(sum(f.nbytes for f in found) / tokens)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = trainee(trainee.collate(part, found, anchors))
        loss.backward()
        optimizer.step()
        _settle(device)
        seconds.append(time.perf_counter() - began)
    trainee.take_gradient_norms()
    return statistics.median(rates[1:]), statistics.median(seconds[1:]), statistics.median(sizes)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(drafter: int, target: int, target_bytes: int, training: TrainingSettings) -> dict[str, float]:
    """GiB of one worker by part; ZeRO shares moments from stage 1, gradients from 2, weights from 3."""
    shares = [training.workers if training.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    weights, gradients, moments = (drafter * size / share for size, share in zip((4, 4, 8), shares, strict=True))
    parts = {"target": target * target_bytes, "weights": weights, "gradients": gradients, "optimizer": moments}
    return {name: size / _GIB for name, size in parts.items()}


def target_parameters(c: ModelConfig) -> int:
    """Parameters of a target."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    attention += c.qkv_bias * c.head_dim * (c.num_heads + 2 * c.num_kv_heads) + c.qk_norm * 2 * c.head_dim
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    return embeddings + c.num_layers * layer + c.hidden_size


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} seconds"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes}:{rest:02} minutes"
