"""Budgeted verification: mismatches that the target scored almost as high as its own choice are kept, for a price.

Approximate Speculative Decoding (arXiv 2608.03447, section 3). The regret of a draft token is how far its logit is
below the row's highest, in nats. The longest prefix is kept in which every mismatch passes the gate (regret per draft
token that is left, itself included), their count the cap, and their sum what remains of the request's budget. Exact
matches behind a kept mismatch are free: the target scored them with that token in their context.

Shapes: B rows, K draft tokens, `...` any leading shape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = float("inf")
"""The regret of a mismatch that no allowance pays for."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one block of drafts may cost.

    `remaining` nats; `gate` nats per draft token left; `cap` exceptions; `ties_need_budget`: an exception, even one
    that costs nothing, needs `remaining` above what the ones before it took. No exception is made where the draft token
    or the target's choice is in `protected_ids`.
    """

    remaining: float
    gate: float
    cap: int
    ties_need_budget: bool = False
    protected_ids: tuple[int, ...] = ()


def budgeted_prefix(
    draft_ids: Tensor,
    top_ids: Tensor,
    regret: Tensor,
    *,
    gate: float | Tensor,
    cap: int | Tensor,
    remaining: float | Tensor,
    length: Tensor | None = None,
    ties_need_budget: bool | Tensor = False,
) -> tuple[Tensor, Tensor]:
    """How many leading draft tokens are kept, and the nats that costs: `[..., K]` -> int64 `[...]`, float64 `[...]`.

    `regret`: nats >= 0, not read where the ids match; NaN or infinite: never kept. The limits hold for all rows or are
    `[...]`; a cap of 0 is strict verification. `length` `[...]`: real draft tokens of each row, the rest is padding.
    Every limit is met with equality, too. Nothing is read back from the device.
    """
    places = torch.arange(draft_ids.shape[-1], device=draft_ids.device)
    length_B1 = _rows(draft_ids.shape[-1] if length is None else length, draft_ids)
    mismatch = draft_ids != top_ids
    cost = torch.where(mismatch, regret.double(), 0.0)
    total = cost.cumsum(-1)
    left = _rows(remaining, draft_ids).double() - total
    pays = (cost <= _rows(gate, draft_ids).double() * (length_B1 - places)) & (left >= 0)
    pays &= mismatch.long().cumsum(-1) <= _rows(cap, draft_ids)
    pays &= ~_rows(ties_need_budget, draft_ids).bool() | (left + cost > 0)
    kept = ((pays & cost.isfinite()) | ~mismatch) & (places < length_B1)
    kept = kept.long().cumprod(-1)
    return kept.sum(-1), torch.where(kept.bool(), cost, 0.0).sum(-1)


def _rows(value: float | Tensor, like: Tensor) -> Tensor:
    """One value for all rows, or one per row, to be set against their draft tokens."""
    found = torch.as_tensor(value, device=like.device)
    return found[..., None] if found.dim() else found
