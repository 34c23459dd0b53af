"""Linear layers with prepacked weights."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

_PROBED_ROWS = 64


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
def least_rows(dtype: torch.dtype) -> int | None:
    """Rows from which on oneDNN gives a row the same product, bitwise, whatever the number of rows; None: never.

    Measured on a random product, since it depends on the processor: two rows in fp32 (one row is a matrix-vector
    product), but 33 in bf16 with AMX, which sums in another order up to 32 rows.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 2048, generator=generator).to(dtype) for rows in (4096, _PROBED_ROWS))
    linear = PackedLinear(weight, least_rows=1)
    expected = linear(x)
    differing = [rows for rows in range(1, _PROBED_ROWS) if not torch.equal(linear(x[:rows]), expected[:rows])]
    least = max(differing, default=1) + 1
    return least if least < _PROBED_ROWS else None


class PackedLinear:
    """x [R, in] → [R, out] with a weight [out, in] and maybe a bias [out], laid out once for the device.

    On CPU the weight goes into oneDNN's blocked layout, which streams memory about twice as fast as `F.linear`, and
    whose result for a row is the same, bitwise, for every number of rows from `least_rows` up; fewer are padded. None
    takes what was measured for the dtype, one row pads nothing. Elsewhere it is `F.linear`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, least_rows: int | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and packing_available()
        self._call = torch.ops.mkldnn._linear_pointwise.default if self._packed else None
        self._least_rows = 1
        if self._packed:
            self._least_rows = least_rows or _measured(weight.dtype)
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._call is None:
            return F.linear(x, self._weight, self._bias)
        rows = x.shape[0]
        if rows >= self._least_rows or not rows:
            return self._call(x, self._weight, self._bias, "none", [], "")
        padded = x.new_zeros(self._least_rows, self.in_features)
        padded[:rows] = x
        return self._call(padded, self._weight, self._bias, "none", [], "")[:rows]


def _measured(dtype: torch.dtype) -> int:
    return least_rows(dtype) or 1
