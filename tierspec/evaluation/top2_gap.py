"""How close a choice was: the distance of the two best logits, computed in float64 from the decoder's hidden state."""

from collections.abc import Sequence

import torch

from tierspec.models import PAGE_TOKENS, Decoder, Step

_HEAD_ROWS = 8192
_BLOCK_TOKENS = 512


class Top2Gap:
    """Called with a text, the gap of the choice behind it: 0 is a tie, below 1e-3 a choice that rounding decides.

    The hidden state is the decoder's own, in its dtype; the product with the head is in float64, whose rounding is
    far below any gap that matters.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._head = decoder.head_weight()

    def __call__(self, token_ids: Sequence[int]) -> float:
        cache = self._decoder.new_cache(len(token_ids) + PAGE_TOKENS)
        sequence = cache.sequence()
        for start in range(0, len(token_ids), _BLOCK_TOKENS):
            hidden = self._decoder.forward([Step(sequence, token_ids[start : start + _BLOCK_TOKENS])], cache)
        last = hidden.last[-1].double()
        logits = torch.cat([block.double() @ last for block in self._head.split(_HEAD_ROWS)])
        first, second = logits.topk(2).values.tolist()
        return first - second
