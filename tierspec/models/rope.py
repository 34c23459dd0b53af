"""Rotary position embedding tables."""

from __future__ import annotations

import torch

from tierspec.models.architecture import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_dim / 2] in fp32; dimension i is paired with i + head_dim / 2 (RoFormer,
    arXiv 2104.09864 section 3, in the half-split layout of Hugging Face checkpoints)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos().to(device).contiguous(), angles.sin().to(device).contiguous()
