"""The interface of the kernels, and the choice of an implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from tierspec.models.cache import BatchLayout, KVCache
from tierspec.models.ops.native import NativeOps, native_library
from tierspec.models.ops.reference import ReferenceOps


class Ops(Protocol):
    """Everything between two matrix products. Row r of a result depends on row r of the arguments alone."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [R, D] → normalised and scaled [R, D]; statistics in fp32."""

    def add_rms_norm(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x [R, D] into `residual` in place, then `rms_norm` of it."""

    def norm_heads(self, qkv: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        """Normalises the first N heads of each row of qkv [R, (N + rest) head_dim] by themselves, in place, and scales
        them with `weights` [N, head_dim]."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[R, 2 I], gate then up → silu(gate) * up [R, I]."""

    def rope_store(
        self,
        qkv: torch.Tensor,
        layout: BatchLayout,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        layer: int,
        heads: int,
    ) -> torch.Tensor:
        """Rotates queries and keys of qkv [R, (heads + 2 kv_heads) head_dim], writes K and V of `layer` into the cache,
        and returns the queries [R, heads * head_dim]."""

    def attend(self, q: torch.Tensor, layout: BatchLayout, cache: KVCache, layer: int, heads: int) -> torch.Tensor:
        """Causal attention of queries [R, heads * head_dim] over their sequences' pages, each row over the positions up
        to its own; softmax in fp32 → [R, heads * head_dim]."""


def select_ops(device: torch.device) -> Ops:
    """The fastest kernels that work on `device`: the C++ ones on CPU where a compiler is found, else PyTorch."""
    if device.type == "cpu":
        library = native_library()
        if library is not None:
            return NativeOps(library)
    return ReferenceOps()
