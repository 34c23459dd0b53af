"""The target's choice at a position: argmax(logits / temperature + keyed Gumbel noise) over what top-k and top-p leave.

Adding Gumbel noise to scaled logits and taking the argmax draws from their softmax; the log normaliser is the same for
every token, so it is not subtracted (arXiv 2408.07978). What a row needs is computed elementwise or by reductions over
that row alone: its choice does not depend on the rest of the batch.

Shapes: R rows, V columns (the vocabulary, or a drafter's part of it), S columns that survive truncation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tierspec.errors import SettingError
from tierspec.sampling.noise import gumbel, gumbel_all
from tierspec.sampling.params import GREEDY_TEMPERATURE

_ARGMAX_GROUP = 64
_TOP_P_WIDTHS = (64, 1024)
_GROUPS_PER_RANK = 8
_CHUNK_ELEMENTS = 2**17
_CHUNK_ROWS = 16
_HOTTEST = 1e30  # 1 / temperature must not vanish in float32: -inf * 0 is NaN


class _Row(NamedTuple):
    number: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stream: int
    position: int


def target_choice(
    logits: Tensor,
    temperature: Tensor | Sequence[float],
    top_k: Tensor | Sequence[int],
    top_p: Tensor | Sequence[float],
    seed: Tensor | Sequence[int],
    stream: Tensor | Sequence[int],
    position: Tensor | Sequence[int],
    ids: Tensor | None = None,
) -> Tensor:
    """The keyed choice of each row of `logits` `[R, V]` (any float type, -inf allowed): int64 token ids `[R]`.

    The other arguments have one value per row. A temperature below 1e-5 is greedy: the argmax, the lowest id on ties,
    nothing else read. Otherwise temperature, then top-k (0 or -1: all), then top-p (the smallest set that holds
    this share of the mass left by top-k); equal logits rank by lowest id. `position` is the absolute index, in prompt
    and output, of the token to be chosen.

    `ids` `[V]`, ascending, maps the columns of a drafter's head to target ids: noise is keyed by target ids, and target
    ids are returned. Raises `SettingError` if an argument does not have R values.
    """
    count, vocabulary = logits.shape
    temperatures = _per_row("temperature", temperature, count)
    columns_R = greedy_choice(logits)
    if any(value >= GREEDY_TEMPERATURE for value in temperatures):
        named = {"top_k": top_k, "top_p": top_p, "seed": seed, "stream": stream, "position": position}
        settings = zip(temperatures, *(_per_row(name, values, count) for name, values in named.items()), strict=True)
        rows = [_Row(number, *values) for number, values in enumerate(settings) if values[0] >= GREEDY_TEMPERATURE]
        cut = [row for row in rows if 0 < row.top_k < vocabulary or row.top_p < 1.0]
        whole = [row for row in rows if not (0 < row.top_k < vocabulary or row.top_p < 1.0)]
        for choose, chosen, size in (
            (_choose_from_all, whole, max(1, _CHUNK_ELEMENTS // vocabulary)),
            (_choose_from_survivors, cut, _CHUNK_ROWS),
        ):
            for start in range(0, len(chosen), size):
                chunk = chosen[start : start + size]
                columns_R[[row.number for row in chunk]] = choose(logits, chunk, ids)
    return columns_R if ids is None else ids[columns_R]


def greedy_choice(logits: Tensor) -> Tensor:
    """The column of the largest value of each row, the lowest on ties: `[R, V]` -> int64 `[R]`."""
    rows, columns = logits.shape
    values = logits.float()
    if values.is_cuda or columns % _ARGMAX_GROUP:
        return values.argmax(dim=-1)
    groups = values.reshape(rows, columns // _ARGMAX_GROUP, _ARGMAX_GROUP)
    best = groups.amax(dim=-1).argmax(dim=-1)
    return best * _ARGMAX_GROUP + groups[torch.arange(rows), best].argmax(dim=-1)


def _choose_from_all(logits: Tensor, rows: list[_Row], ids: Tensor | None) -> Tensor:
    inverse_R1 = torch.tensor([_inverse(row) for row in rows], device=logits.device)[:, None]
    seed, stream, position = _keys(rows)
    if ids is None:
        noise = gumbel_all(seed, stream, position, logits.shape[1], logits.device)
    else:
        noise = gumbel(seed, stream, position, ids)
    return greedy_choice((logits[[row.number for row in rows]].float() * inverse_R1).add_(noise))


def _choose_from_survivors(logits: Tensor, rows: list[_Row], ids: Tensor | None) -> Tensor:
    survivors, scores = [], []
    for row in rows:
        scaled = logits[row.number].float() * _inverse(row)
        survivors.append(_survivors(scaled, row.top_k, row.top_p))
        scores.append(scaled[survivors[-1]])
    sizes = [len(columns) for columns in survivors]
    columns_S = torch.cat(survivors)
    ids_S = columns_S if ids is None else ids[columns_S]
    repeats = torch.tensor(sizes)
    seed, stream, position = (key.repeat_interleave(repeats) for key in _keys(rows))
    noise_S = gumbel(seed, stream, position, ids_S[:, None])[:, 0]
    noisy = (torch.cat(scores) + noise_S).split(sizes)
    return torch.stack([columns[score.argmax()] for columns, score in zip(survivors, noisy, strict=True)])


def _survivors(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ascending columns of the row `scaled` `[V]` (logits / temperature) that top-k, then top-p leave."""
    limit = top_k if 0 < top_k < len(scaled) else len(scaled)
    if top_p >= 1.0:
        return _ranked(scaled, limit).sort().values
    limited = limit < len(scaled)
    weights = (scaled - scaled.max()).exp_()
    for width in (limit,) if limited else (*_TOP_P_WIDTHS, limit):
        ranked = _ranked(scaled, width)
        mass = weights[ranked].cumsum(0, dtype=torch.float64)
        needed = top_p * (mass[-1] if limited else weights.sum(dtype=torch.float64))
        if mass[-1] >= needed:
            break
    return ranked[: int((mass < needed).sum()) + 1].sort().values


def _ranked(scaled: Tensor, width: int) -> Tensor:
    """The `width` best columns of a row, by falling value and then rising column, without sorting the row.

    The n-th largest maximum of disjoint groups of columns bounds the n-th largest value from below, so few columns
    remain to be sorted.
    """
    groups = width * _GROUPS_PER_RANK
    span = len(scaled) // groups
    if width >= len(scaled):
        return scaled.sort(descending=True, stable=True).indices
    bounds = scaled[: groups * span].view(span, groups).amax(dim=0) if span > 1 else scaled
    columns = (scaled >= bounds.topk(width).values[-1]).nonzero()[:, 0]
    return columns[scaled[columns].sort(descending=True, stable=True).indices[:width]]


def _inverse(row: _Row) -> float:
    return 1.0 / min(row.temperature, _HOTTEST)


def _keys(rows: list[_Row]) -> tuple[Tensor, Tensor, Tensor]:
    seed, stream, position = torch.tensor([row[-3:] for row in rows], dtype=torch.int64).unbind(dim=1)
    return seed, stream, position


def _per_row(name: str, values: Tensor | Sequence, count: int) -> list:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    if len(listed) != count:
        raise SettingError(f"{name}: {len(listed)} values for {count} rows of logits")
    return listed
