"""A drafter's part that runs where the target runs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tierspec.models.ops import Ops, PackedLinear


class LinearProjection:
    """The drafter's `fc`: concatenated target features to its state size, normalised where it has a norm."""

    def __init__(self, weight: Tensor, layers: Sequence[int], norm: tuple[Ops, Tensor, float] | None = None) -> None:
        """`norm`: kernels, weight and epsilon of a norm behind it."""
        self._linear = PackedLinear(weight)
        self._layers = tuple(layers)
        self._dtype = weight.dtype
        self._norm = norm

    @torch.no_grad()
    def __call__(self, features: Mapping[int, Tensor]) -> Tensor:
        """{hidden_states index: [R, D]} → [R, d] in bf16."""
        x = torch.cat([features[layer].to(self._dtype) for layer in self._layers], -1)
        projected = self._linear(x)
        if self._norm is not None:
            ops, weight, eps = self._norm
            projected = ops.rms_norm(projected, weight, eps)
        return projected.to(torch.bfloat16)
