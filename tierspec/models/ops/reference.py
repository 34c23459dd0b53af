"""The kernels in plain PyTorch: for GPUs, and for CPUs without a C++ compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tierspec.models.cache import PAGE_TOKENS, BatchLayout, KVCache


class ReferenceOps:
    """Implements `Ops` with gathered pages and padded matrix products; no host synchronisation."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    def add_rms_norm(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def norm_heads(self, qkv: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        heads = qkv.view(qkv.shape[0], -1, weights.shape[1])[:, : weights.shape[0]]
        heads.copy_(self.rms_norm(heads, weights, eps))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

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
        kv_heads, dim = keys.shape[1], keys.shape[2]
        heads_first = qkv.view(qkv.shape[0], heads + 2 * kv_heads, dim)
        cos, sin = (table[layout.positions][:, None, :] for table in rope)
        rotating = heads_first[:, : heads + kv_heads].float()
        first, second = rotating.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
        page, offset = layout.slots // PAGE_TOKENS, layout.slots % PAGE_TOKENS
        keys[page, :, :, offset] = rotated[:, heads:]
        values[page, :, offset] = heads_first[:, heads + kv_heads :]
        return rotated[:, :heads].reshape(qkv.shape[0], heads * dim)

    def attend(self, q: torch.Tensor, layout: BatchLayout, cache: KVCache, layer: int, heads: int) -> torch.Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        kv_heads, dim = keys.shape[1], keys.shape[2]
        group, rows = heads // kv_heads, q.shape[0]
        batch, pages = layout.block_tables.shape
        padding_rows = rows - layout.rows
        counts = (*layout.counts, padding_rows) if padding_rows else layout.counts
        longest = max(counts)
        within = torch.cat([torch.arange(c) for c in counts]).to(q.device, non_blocking=True)

        padded = q.new_zeros(batch, longest, heads, dim)
        padded[layout.sequence, within] = q.view(rows, heads, dim)
        limits = layout.positions.new_zeros(batch, longest)
        limits[layout.sequence, within] = layout.positions

        k = keys[layout.block_tables].permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, dim, pages * PAGE_TOKENS)
        v = values[layout.block_tables].permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, pages * PAGE_TOKENS, dim)
        grouped = padded.view(batch, longest, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        scores = grouped.reshape(batch, kv_heads, group * longest, dim).float() @ k.float() * dim**-0.5
        visible = torch.arange(pages * PAGE_TOKENS, device=q.device)[None, None, :] <= limits[:, :, None]
        scores = scores.view(batch, kv_heads, group, longest, -1).masked_fill(~visible[:, None, None], float("-inf"))
        weights = scores.softmax(-1).view(batch, kv_heads, group * longest, -1)
        mixed = (weights @ v.float()).view(batch, kv_heads, group, longest, dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(batch, longest, heads * dim)[layout.sequence, within].to(q.dtype)
