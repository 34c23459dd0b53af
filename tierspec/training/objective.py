"""The VAT objective (arXiv 2608.30135 sections 4.2 to 4.4) on blocks of K draft positions.

Per block: sum_k w_k (soft_k + hard_k) + beta * mean_k BCE_k. Blocks with a valid position are averaged and the whole
is divided by the sum of the base schedule, so that gradient norms stay comparable between weightings (our choice).
Where the target's choice is outside a pruned draft vocabulary, the position is rejected, its soft loss is masked
and its head loss kept; the hard loss is masked where the corpus token is outside (our choice).
Legend: N blocks, K positions, V target vocabulary, C draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tierspec.config import ObjectiveSettings
from tierspec.training.factors import Coefficients, loss_factors
from tierspec.training.monitors import Monitors
from tierspec.training.weighting import adaptive_weights, base_schedule

__all__ = [
    "adaptive_weights",
    "base_schedule",
    "columns_of",
    "head_loss",
    "normaliser",
    "vat_loss",
]


def columns_of(ids: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Draft column of each target id, -1 where the draft vocabulary lacks it; None is the full vocabulary."""
    if target_ids is None:
        return ids
    column = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
    column[target_ids] = torch.arange(target_ids.shape[0], device=ids.device)
    return column[ids]


def head_loss(survival_logits: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of the verification head: its weighted sum over all blocks, and per position [..., K]."""
    loss = F.binary_cross_entropy_with_logits(
        survival_logits, coefficients.survived.to(survival_logits.dtype), reduction="none"
    )
    return (coefficients.head * loss).sum(), loss.detach()


def normaliser(valid: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Divisor of the sum over blocks: blocks with a valid position (at least 1) times the sum of the base schedule."""
    return valid[..., 0].sum().clamp_min(1) * base_schedule(settings, valid.shape[-1]).sum().to(valid.device)


def vat_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    survival_logits: Tensor,
    valid: Tensor,
    settings: ObjectiveSettings,
    *,
    target_ids: Tensor | None = None,
    accepted: Tensor | None = None,
) -> tuple[Tensor, Monitors]:
    """The objective from full logits; training uses the equal `chunked_vat_loss`.

    draft_logits [..., K, C]; target_logits [..., K, V], the target's prediction of the same position; labels int64
    [..., K], corpus tokens; survival_logits [..., K]; valid bool [..., K]; target_ids int64 [C], the target id of every
    draft column, ascending (None: C = V); accepted bool [..., K], the outcome of the acceptance rule (None: of the
    greedy one). Returns the scalar loss and the monitors.
    """
    vocab_size = target_logits.shape[-1]
    top_columns = columns_of(target_logits.argmax(-1), target_ids, vocab_size)
    label_columns = columns_of(labels, target_ids, vocab_size)
    teacher = target_logits if target_ids is None else target_logits[..., target_ids]
    log_q = draft_logits.log_softmax(-1)
    soft = -(teacher.detach().softmax(-1) * log_q).sum(-1)
    hard = -log_q.gather(-1, label_columns.clamp_min(0)[..., None])[..., 0]
    if accepted is None:
        accepted = draft_logits.argmax(-1) == top_columns
    coefficients = loss_factors(accepted, top_columns, label_columns, hard.detach().neg().exp(), valid, settings)
    head, head_rows = head_loss(survival_logits, coefficients)
    total = (coefficients.soft * soft + coefficients.hard * hard).sum() + head
    monitors = Monitors.of_blocks(coefficients, valid, soft.detach(), hard.detach(), head_rows, survival_logits)
    return total / normaliser(valid, settings), monitors
