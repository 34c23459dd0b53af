"""Kernels of the decoder behind one interface: ours in C++ on CPU, plain PyTorch elsewhere."""

from tierspec.models.ops.linear import ANY_ROWS, PackedLinear, invariant_rows, packing_available
from tierspec.models.ops.native import NativeOps
from tierspec.models.ops.reference import ReferenceOps
from tierspec.models.ops.selection import Ops, select_ops

__all__ = [
    "ANY_ROWS",
    "NativeOps",
    "Ops",
    "PackedLinear",
    "ReferenceOps",
    "invariant_rows",
    "packing_available",
    "select_ops",
]
