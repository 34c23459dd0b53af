"""The paged KV cache: a pool of pages of 64 tokens, and per sequence a block table and a length.

Everything here can be thrown away and rebuilt from the committed token ids; rolling back is setting a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE_TOKENS = 64
_SCRATCH_PAGE = 0  # rows that only pad a batch read and write here


class CacheFull(RuntimeError):
    """No free page is left; nothing was changed."""


class CacheSequence:
    """One sequence's place in a cache: its pages in order, and how many tokens they hold."""

    __slots__ = ("_cache", "length", "pages")

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.pages: list[int] = []
        self.length = 0

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` more tokens. Raises CacheFull, changing nothing, if the pool is exhausted."""
        missing = -(-(self.length + tokens) // PAGE_TOKENS) - len(self.pages)
        if missing > 0:
            self.pages.extend(self._cache.take(missing))

    def truncate(self, length: int) -> None:
        """Rolls back to the first `length` tokens, as if the later ones had never been there."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a sequence of {self.length} tokens to {length}")
        self.length = length
        keep = -(-length // PAGE_TOKENS)
        self._cache.give_back(self.pages[keep:])
        del self.pages[keep:]

    def release(self) -> None:
        """Gives all pages back."""
        self.truncate(0)


@dataclass(frozen=True)
class Step:
    """Token ids to run for one sequence, at the positions that follow what it already holds."""

    sequence: CacheSequence
    token_ids: Sequence[int]


@dataclass(frozen=True)
class BatchLayout:
    """Where the rows of a ragged batch read and write. Padding rows come last and use the scratch page.

    `positions`, `slots` (page * 64 + offset) and `sequence` (row of `block_tables`) are int64 [R]; `block_tables` is
    int64 [B, P]; `rows` is the number of real rows, and `counts` that of each sequence.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    sequence: torch.Tensor
    block_tables: torch.Tensor
    rows: int
    counts: tuple[int, ...]


class KVCache:
    """Keys [L, pages, kv_heads, head_dim, 64] and values [L, pages, kv_heads, 64, head_dim] of L attention layers."""

    def __init__(
        self,
        *,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        token_budget: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        pages = 1 + -(-token_budget // PAGE_TOKENS)
        self.layer_index = {layer: i for i, layer in enumerate(layers)}
        self.keys = torch.zeros(len(layers), pages, kv_heads, head_dim, PAGE_TOKENS, dtype=dtype, device=device)
        self.values = torch.zeros(len(layers), pages, kv_heads, PAGE_TOKENS, head_dim, dtype=dtype, device=device)
        self._free = list(range(pages - 1, _SCRATCH_PAGE, -1))

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into the pages nobody holds."""
        return len(self._free) * PAGE_TOKENS

    def sequence(self) -> CacheSequence:
        """A new, empty sequence."""
        return CacheSequence(self)

    def take(self, count: int) -> list[int]:
        """Takes `count` free pages, or raises CacheFull and takes none."""
        if count > len(self._free):
            raise CacheFull(f"{count} pages wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Returns pages to the pool."""
        self._free.extend(pages)

    def layout(self, steps: Sequence[Step], *, padded_rows: int | None = None) -> BatchLayout:
        """Reserves the pages that `steps` need and lays out their rows, then counts them as held.

        Raises:
            CacheFull: the pool is exhausted; no sequence was changed.
        """
        done: list[tuple[CacheSequence, int]] = []
        try:
            for step in steps:
                done.append((step.sequence, len(step.sequence.pages)))
                step.sequence.reserve(len(step.token_ids))
        except CacheFull:
            for sequence, count in done:
                self.give_back(sequence.pages[count:])
                del sequence.pages[count:]
            raise

        positions: list[int] = []
        slots: list[int] = []
        owners: list[int] = []
        for index, step in enumerate(steps):
            start, pages, count = step.sequence.length, step.sequence.pages, len(step.token_ids)
            positions.extend(range(start, start + count))
            slots.extend(pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(start, start + count))
            owners.extend([index] * count)
            step.sequence.length = start + count
        rows = len(positions)
        padding = max(0, (padded_rows or rows) - rows)
        tables = [step.sequence.pages for step in steps]
        if padding:
            positions.extend([0] * padding)
            slots.extend([_SCRATCH_PAGE] * padding)
            owners.extend([len(tables)] * padding)
            tables = [*tables, [_SCRATCH_PAGE]]
        width = max(map(len, tables))
        device = self.keys.device
        return BatchLayout(
            positions=_tensor(positions, device),
            slots=_tensor(slots, device),
            sequence=_tensor(owners, device),
            block_tables=_tensor([t + [_SCRATCH_PAGE] * (width - len(t)) for t in tables], device),
            rows=rows,
            counts=tuple(len(step.token_ids) for step in steps),
        )


def _tensor(values: list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
