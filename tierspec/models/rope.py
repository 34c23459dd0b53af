"""Rotary position embedding: its options, and the tables that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierspec.errors import SettingError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Base frequency, and the kind of scaling for longer contexts: "default" (none), "linear" (positions divided by
    `factor`), "llama3" or "yarn" (arXiv 2309.00071). Only the fields of its kind count.

    original_context: tokens the model was first trained for; low_freq_factor, high_freq_factor: llama3's bounds, as
    rotations per original context; beta_fast, beta_slow: yarn's bounds, likewise; attention_factor: what cosines and
    sines are multiplied with under yarn.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From a ``config.json``: transformers 5 writes `rope_parameters`; older files have `rope_theta` beside an
        optional `rope_scaling`.

        Raises:
            SettingError: a kind that is not supported.
            KeyError, TypeError, ValueError: a field is missing or malformed.
        """
        given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = given.get("rope_type", given.get("type", "default")) or "default"
        theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
        context = int(given.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048))
        match kind:
            case "default":
                return cls(theta)
            case "linear":
                return cls(theta, kind, float(given["factor"]))
            case "llama3":
                low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
                return cls(theta, kind, float(given["factor"]), context, low, high)
            case "yarn":
                return cls(
                    theta,
                    kind,
                    float(given["factor"]),
                    context,
                    beta_fast=float(given.get("beta_fast") or 32.0),
                    beta_slow=float(given.get("beta_slow") or 1.0),
                    attention_factor=_attention_factor(given),
                )
        raise SettingError(f"target.source: RoPE type {kind!r} is not supported (supported: {', '.join(KINDS)})")


def _attention_factor(given: Mapping[str, Any]) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    factor, scale, whole = float(given["factor"]), given.get("mscale"), given.get("mscale_all_dim")
    return temperature(float(scale)) / temperature(float(whole)) if scale and whole else temperature(1.0)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_dim / 2] in fp32; dimension i is paired with i + head_dim / 2 (RoFormer,
    arXiv 2104.09864 section 3, in the half-split layout of Hugging Face checkpoints)."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(rope, head_dim)[None, :]
    scale = rope.attention_factor
    return (angles.cos() * scale).to(device).contiguous(), (angles.sin() * scale).to(device).contiguous()


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _mixed(plain, rope.factor, _llama3_share(rope, 2 * math.pi / plain))
        case "yarn":
            return _mixed(plain, rope.factor, _yarn_share(rope, head_dim))
        case _:
            return plain


def _mixed(plain: torch.Tensor, factor: float, share: torch.Tensor) -> torch.Tensor:
    """Frequencies of which a share stays as it is, and the rest is interpolated."""
    return (1 - share) * plain / factor + share * plain


def _llama3_share(rope: RopeConfig, wave_lengths: torch.Tensor) -> torch.Tensor:
    """Long waves are interpolated, short ones stay, linearly between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return ((rope.original_context / wave_lengths - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_share(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions that rotate often within the original context stay, seldom ones are interpolated (section 3.2)."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(dimension(rope.beta_fast)), 0), min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
