"""Linear layers with prepacked weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_TILE = 64
_PROBED = (2, 3, 8, 16, 32, 33, 64, 128, 300)


@dataclass(frozen=True)
class RowRule:
    """How the rows of a product are cut and padded: calls of at least so many rows, or of exactly so many."""

    rows: int
    exactly: bool = False


ANY_ROWS = RowRule(1)


@functools.cache
def packing_available() -> bool:
    """Whether PyTorch's private oneDNN packing operators exist here and agree with a plain product."""
    try:
        weight, x = torch.eye(16, dtype=torch.float32), torch.ones(2, 16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return torch.equal(torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), x)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


@functools.cache
def invariant_rows(dtype: torch.dtype) -> RowRule | None:
    """The rule under which a row's product does not depend, bitwise, on the rows beside it; None: there is none here.

    Measured, since it depends on the processor. As a rule two rows do (one row is a matrix-vector product). In bf16
    with AMX, oneDNN's order of summation depends on the number of rows, up to several hundred, so all calls get one
    shape: 64 rows, which stream the weights hardly slower than two.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 1024, generator=generator).to(dtype) for rows in (4096, 400))
    linear = PackedLinear(weight, rule=ANY_ROWS)
    expected = linear(x)
    if all(torch.equal(linear(x[:rows]), expected[:rows]) for rows in _PROBED):
        return RowRule(2)
    tiled = PackedLinear(weight, rule=RowRule(_TILE, exactly=True))
    return RowRule(_TILE, exactly=True) if torch.equal(tiled(x.flip(0)).flip(0), tiled(x)) else None


class PackedLinear:
    """x [R, in] → [R, out] with a weight [out, in] and maybe a bias [out], laid out once for the device.

    On CPU the weight goes into oneDNN's blocked layout, which streams memory about twice as fast as `F.linear`.
    `rule` says how rows are padded; None takes the one that makes a row's result independent of the others, where it
    exists. Elsewhere it is `F.linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, rule: RowRule | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and packing_available()
        if self._packed:
            self._rule = rule or invariant_rows(weight.dtype) or ANY_ROWS
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        rows, rule = x.shape[0], self._rule
        if rows and rows < rule.rows:
            padded = x.new_zeros(rule.rows, self.in_features)
            padded[:rows] = x
            return self._product(padded)[:rows]
        if not rule.exactly or rows <= rule.rows:
            return self._product(x)
        whole = rows - rows % rule.rows
        tiles = [self._product(tile) for tile in x[:whole].split(rule.rows)]
        return torch.cat([*tiles, self(x[whole:])] if whole < rows else tiles)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
