"""Verification simulated at training time (arXiv 2608.30135 section 4.1): which draft positions would have survived.

A block is one anchor with its K draft positions. A position that is not valid (past the end, another turn) counts
neither as accepted nor as rejected; validity is a contiguous prefix of the block (our choice).
"""

import torch
from torch import Tensor


def survival(accepted: Tensor, valid: Tensor | None = None) -> Tensor:
    """Whether position k and all before it were accepted.

    accepted: bool [..., K]; valid: bool [..., K] or None (all valid). Returns bool [..., K]: the cumulative product
    along K, false wherever the valid prefix has ended.
    """
    alive = accepted if valid is None else accepted & valid
    return alive.cumprod(-1).bool()


def first_rejection(accepted: Tensor, valid: Tensor | None = None) -> Tensor:
    """1-based position of the first miss, the paper's k*; valid length + 1 if there is none.

    accepted: bool [..., K]; valid: bool [..., K] or None. Returns int64 [...].
    """
    return survival(accepted, valid).sum(-1, dtype=torch.int64) + 1
