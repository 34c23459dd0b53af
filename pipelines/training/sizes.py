"""How large a training run is, from its settings, the shape of the target and the rollouts alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierspec.config import Settings, TrainingSettings
from tierspec.drafters.families import parameter_shapes
from tierspec.models import ModelConfig
from tierspec.training.data import Sample, check_token_ids
from tierspec.training.families import drafter_config
from tierspec.training.feature_store import store_bytes

STATE_BYTES_PER_PARAMETER = 14  # of a checkpoint: fp32 weight and two moments, bf16 weight for inference
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class RunSizes:
    """Counts of parameters (the drafter's with its verification head), of samples, and of their tokens, prompts
    included; `steps`: optimizer steps, were it not for a limit in minutes; bytes of the features in all, of those kept
    in a worker's memory and of those on disk; bytes of one worker by part, and of the disk."""

    drafter_parameters: int
    target_parameters: int
    samples: int
    tokens: int
    response_tokens: int
    steps_per_epoch: int
    steps: int
    feature_bytes: int
    feature_memory_bytes: int
    feature_disk_bytes: int
    memory_bytes: dict[str, float]
    disk_bytes: int

    @property
    def kept_share(self) -> float:
        """Share of the features that a later epoch finds where they are needed; a worker keeps what it has seen."""
        if self.feature_disk_bytes:
            return 1.0
        return self.feature_memory_bytes / self.feature_bytes


def run_sizes(settings: Settings, target: ModelConfig, tokenizer: Any, samples: Sequence[Sample]) -> RunSizes:
    """Everything that follows without the weights of the target.

    Raises:
        SettingError: settings that do not fit the target.
        ArtifactError: rollouts with tokens that it does not have.
    """
    training = settings.training
    check_token_ids(samples, target.vocab_size)
    config = drafter_config(settings, target, tokenizer, embedding_sha256="")
    drafter = sum(math.prod(shape) for shape in parameter_shapes(config).values()) + config.hidden_size + 1

    per_step = training.workers * training.accumulation * training.batch_sequences
    steps_per_epoch = -(-len(samples) // per_step)
    steps = training.epochs * steps_per_epoch
    tokens = sum(len(sample.token_ids) for sample in samples)
    itemsize = _ITEM_BYTES[settings.target.dtype]
    features = store_bytes(tokens, len(config.feature_layers), target.hidden_size, itemsize)
    on_disk = features if training.features == "cached" else 0
    in_memory = 0
    if training.features == "inline" and training.epochs > 1:
        in_memory = min(training.feature_cache_mb * 2**20, features // training.workers)
    memory = _memory(drafter, target_parameters(target) * itemsize, training) | {"features": float(in_memory)}
    return RunSizes(
        drafter_parameters=drafter,
        target_parameters=target_parameters(target),
        samples=len(samples),
        tokens=tokens,
        response_tokens=sum(len(sample.response_ids) for sample in samples),
        steps_per_epoch=steps_per_epoch,
        steps=min(steps, training.max_steps or steps),
        feature_bytes=features,
        feature_memory_bytes=in_memory,
        feature_disk_bytes=on_disk,
        memory_bytes=memory,
        disk_bytes=drafter * STATE_BYTES_PER_PARAMETER * (training.keep_last + 2) + on_disk,
    )


def _memory(drafter: int, target_bytes: int, training: TrainingSettings) -> dict[str, float]:
    """Bytes of one worker by part; ZeRO shares moments from stage 1, gradients from 2, weights from 3."""
    shares = [training.workers if training.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    weights, gradients, moments = (drafter * size / share for size, share in zip((4, 4, 8), shares, strict=True))
    return {"target": target_bytes, "weights": weights, "gradients": gradients, "optimizer": moments}


def target_parameters(c: ModelConfig) -> int:
    """Parameters of a target."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    attention += c.qkv_bias * c.head_dim * (c.num_heads + 2 * c.num_kv_heads) + c.qk_norm * 2 * c.head_dim
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    return embeddings + c.num_layers * layer + c.hidden_size
