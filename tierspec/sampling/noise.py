"""Keyed Gumbel noise: the same number for the same (seed, stream, position, token id) in every tier, batch and device.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with
key = the 64-bit seed, counter = (id >> 2, position, stream, 0), lane = id & 3, u = (top 24 bits + 1/2) / 2**24 and
G = -log(-log u). Drafter-invariant sampling by shared noise: arXiv 2408.07978; the keying is our choice.

Torch has no unsigned 64-bit arithmetic, so 32-bit words live in int64: products wrap modulo 2**64 and what is left
above a word is masked.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PerRow = Tensor | Sequence[int]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words and two key words, each an int64 tensor of 32-bit words.

    Counters broadcast together, keys to the counters. Returns the four lanes. Words 0 and 2 are worked on as one
    tensor, words 1 and 3 as another: on small inputs the number of tensor operations is the cost.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    even, odd, keys = torch.stack((c0, c2)), torch.stack((c1, c3)), torch.stack(tuple(key))
    pair = (2, *(1,) * c0.dim())
    multipliers = torch.tensor(_MULTIPLIERS, device=c0.device).view(pair)
    weyl = torch.tensor(_WEYL, device=c0.device).view(pair)
    for _ in range(_ROUNDS):
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(keys).bitwise_and_(_WORD)
        odd = product
        keys = keys + weyl
    odd = odd & _WORD
    return even[0], odd[0], even[1], odd[1]


def gumbel(seed: PerRow, stream: PerRow, position: PerRow, ids: Tensor) -> Tensor:
    """Noise of chosen token ids.

    `seed`, `stream`, `position`: one int64 per row `[R]`; `ids`: `[S]` for all rows, or `[R, S]`. Returns float32
    `[R, S]` on the device of `ids`. `position` is the absolute index, in prompt and output, of the token to be chosen.
    """
    ids = ids if ids.dim() == 2 else ids[None]
    lanes = torch.stack(_lanes(seed, stream, position, ids >> 2))
    return _gumbel_of_words(lanes.gather(0, (ids & 3).expand_as(lanes[:1]))[0])


def gumbel_all(seed: PerRow, stream: PerRow, position: PerRow, size: int, device: torch.device | str = "cpu") -> Tensor:
    """`gumbel` of the ids 0 .. size - 1, four ids per Philox evaluation. Returns float32 `[R, size]`."""
    lanes = _lanes(seed, stream, position, torch.arange((size + 3) // 4, device=device)[None])
    return _gumbel_of_words(torch.stack(lanes, dim=-1).flatten(1)[:, :size].contiguous())


def _lanes(seed: PerRow, stream: PerRow, position: PerRow, block_RS: Tensor) -> tuple[Tensor, ...]:
    seed_R1, stream_R1, position_R1 = (
        torch.as_tensor(values, dtype=torch.int64, device=block_RS.device)[:, None]
        for values in (seed, stream, position)
    )
    key = (seed_R1 & _WORD, (seed_R1 >> 32) & _WORD)
    return philox4x32((block_RS, position_R1, stream_R1, torch.zeros_like(stream_R1)), key)


def _gumbel_of_words(words: Tensor) -> Tensor:
    uniform = (words >> 8).to(torch.float64).add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
