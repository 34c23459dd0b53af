"""The C++ kernels, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from tierspec.compiled import CompilationFailed, compiled_library
from tierspec.models.cache import BatchLayout, KVCache

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "rms_norm": (_P, _P, _P, _I64, _I64, _F32),
    "add_rms_norm": (_P, _P, _P, _P, _I64, _I64, _F32),
    "norm_heads": (_P, _P, _I64, _I64, _I64, _I64, _F32),
    "silu_mul": (_P, _P, _I64, _I64),
    "rope_store": (_P, _P, _P, _P, _P, _P, _P, _P, _I64, _I32, _I32, _I32),
    "attend": (_P, _P, _P, _P, _P, _P, _I64, _P, _I64, _I32, _I32, _I32, _F32),
}
_log = logging.getLogger(__name__)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one warning) where there is no working C++ compiler.

    They use the OpenMP runtime that PyTorch has already loaded, so that both share one pool of threads.
    """
    try:
        library = compiled_library(_SOURCE, _FLAGS)
    except CompilationFailed as error:
        _log.warning("%s: the decoder falls back to plain PyTorch kernels, which are slower", error)
        return None
    for name, arguments in _SIGNATURES.items():
        for suffix in _SUFFIX.values():
            function = getattr(library, f"tierspec_{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
    return library


class NativeOps:
    """Implements `Ops` on CPU tensors, contiguous, in float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        names = [(name, dtype) for name in _SIGNATURES for dtype in _SUFFIX]
        self._functions = {(n, d): getattr(library, f"tierspec_{n}_{_SUFFIX[d]}") for n, d in names}

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._functions["rms_norm", x.dtype](x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps)
        return out

    def add_rms_norm(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._functions["add_rms_norm", x.dtype](
            residual.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps
        )
        return out

    def norm_heads(self, qkv: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        heads, dim = weights.shape
        rows, width = qkv.shape
        self._functions["norm_heads", qkv.dtype](qkv.data_ptr(), weights.data_ptr(), rows, width, heads, dim, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, dim)
        self._functions["silu_mul", gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), rows, dim)
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        layout: BatchLayout,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        layer: int,
        heads: int,
    ) -> torch.Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        _, kv_heads, dim, _ = keys.shape
        rows = qkv.shape[0]
        out = qkv.new_empty(rows, heads * dim)
        self._functions["rope_store", qkv.dtype](
            qkv.data_ptr(),
            layout.positions.data_ptr(),
            layout.slots.data_ptr(),
            rope[0].data_ptr(),
            rope[1].data_ptr(),
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            rows,
            heads,
            kv_heads,
            dim,
        )
        return out

    def attend(self, q: torch.Tensor, layout: BatchLayout, cache: KVCache, layer: int, heads: int) -> torch.Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        _, kv_heads, dim, _ = keys.shape
        out = torch.empty_like(q)
        self._functions["attend", q.dtype](
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            layout.positions.data_ptr(),
            layout.sequence.data_ptr(),
            layout.block_tables.data_ptr(),
            layout.block_tables.shape[1],
            out.data_ptr(),
            q.shape[0],
            heads,
            kv_heads,
            dim,
            dim**-0.5,
        )
        return out
