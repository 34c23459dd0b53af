"""`vat_loss` without the logits of all rows: whole blocks are processed chunk by chunk, gradients included.

The factors of the cross-entropies are constants of the gradient, so the gradient with respect to a chunk's logits is
known in closed form: soft (q - p) + hard (q - onehot). The forward pass turns it into gradients of the drafter's hidden
states and head at once: logits are computed once and never kept.
Legend: N blocks, K positions, M = N K rows, R teacher rows, C draft vocabulary, D and E hidden sizes of both models.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tierspec.config import ObjectiveSettings
from tierspec.training.acceptance import AcceptanceRule, ScoredRows, greedy_acceptance
from tierspec.training.factors import loss_factors
from tierspec.training.monitors import Monitors
from tierspec.training.objective import head_loss, normaliser
from tierspec.training.weighting import base_schedule


@dataclass(frozen=True)
class TeacherRows:
    """The target's view of the blocks; its hidden states are shared by all blocks that look at the same position.

    hidden [R, E], post-final-norm; rows int64 [N, K], the one that predicts each position; top_columns and
    label_columns int64 [N, K], draft columns of the target's choice among all its tokens and of the corpus token (-1:
    outside the draft vocabulary); head [C, E], the target's frozen head at the draft vocabulary; log_normaliser [R],
    log-sum-exp of the target's logits over its whole vocabulary, for the rules that need it.
    """

    hidden: Tensor
    rows: Tensor
    top_columns: Tensor
    label_columns: Tensor
    head: Tensor
    log_normaliser: Tensor | None = None

    def distribution(self, blocks: slice) -> tuple[Tensor, Tensor]:
        """For every row of the blocks: the target's distribution, renormalised on the draft vocabulary, [M, C], and the
        share of the whole that lies there, [M] (1 where `log_normaliser` is None)."""
        distinct, inverse = torch.unique(self.rows[blocks], return_inverse=True)
        logits = _logits(self.hidden[distinct], self.head)
        inverse = inverse.flatten()
        if self.log_normaliser is None:
            covered = logits.new_ones(distinct.shape)
        else:
            covered = (logits.logsumexp(-1) - self.log_normaliser[distinct]).exp().clamp_max(1.0)
        return logits.softmax(-1)[inverse], covered[inverse]


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    logits = F.linear(hidden, head)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _TokenLoss(torch.autograd.Function):
    """(weighted sum of all cross-entropies, then without gradient: soft, hard and accepted, each [N, K])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher: TeacherRows,
        valid: Tensor,
        settings: ObjectiveSettings,
        rule: AcceptanceRule,
        blocks_per_chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = teacher.head.dtype
        cast_weight = weight.to(dtype)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        loss = hidden.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        rows = []
        for start in range(0, hidden.shape[0], blocks_per_chunk):
            blocks = slice(start, start + blocks_per_chunk)
            x_MD = hidden[blocks].flatten(0, 1).to(dtype)
            logits_MC = _logits(x_MD, cast_weight)
            top_M, draft_M = logits_MC.max(-1)
            p_MC, covered_M = teacher.distribution(blocks)
            label_M1 = teacher.label_columns[blocks].reshape(-1, 1)
            cross_p_M = torch.linalg.vecdot(p_MC, logits_MC)
            at_label_M = logits_MC.gather(-1, label_M1.clamp_min(0))[:, 0]
            q_MC = logits_MC.softmax(-1)
            log_sum_M = top_M - q_MC.gather(-1, draft_M[:, None])[:, 0].log()
            soft_M, hard_M = log_sum_M - cross_p_M, log_sum_M - at_label_M

            accepted_M = rule(
                ScoredRows(
                    draft_columns=draft_M,
                    draft=q_MC,
                    target=p_MC,
                    covered=covered_M,
                    top_columns=teacher.top_columns[blocks].flatten(),
                    label_columns=label_M1[:, 0],
                    first=start * valid.shape[-1],
                )
            )
            factors = loss_factors(
                accepted_M.view_as(valid[blocks]),
                teacher.top_columns[blocks],
                teacher.label_columns[blocks],
                hard_M.neg().exp().view_as(valid[blocks]),
                valid[blocks],
                settings,
            )
            w_soft_M1, w_hard_M1 = factors.soft.reshape(-1, 1), factors.hard.reshape(-1, 1)
            loss += (w_soft_M1[:, 0] * soft_M + w_hard_M1[:, 0] * hard_M).sum()
            grad_MC = q_MC.mul_(w_soft_M1 + w_hard_M1).sub_(p_MC.mul_(w_soft_M1))
            grad_MC.scatter_add_(-1, label_M1.clamp_min(0), -w_hard_M1.to(grad_MC.dtype))
            grad_MC = grad_MC.to(dtype)
            grad_hidden[blocks] = (grad_MC @ cast_weight).view_as(grad_hidden[blocks])
            if grad_weight is not None:
                grad_weight += grad_MC.T @ x_MD
            rows.append((soft_M, hard_M, accepted_M))
        ctx.save_for_backward(grad_hidden, grad_weight)
        soft, hard, accepted = (torch.cat(parts).view_as(valid) for parts in zip(*rows, strict=True))
        ctx.mark_non_differentiable(soft, hard, accepted)
        return loss, soft, hard, accepted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = None if grad_weight is None else grad * grad_weight
        return grad * grad_hidden, of_weight, None, None, None, None, None


def state_loss(
    hidden: Tensor, teacher: TeacherRows, valid: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """Regression of the states onto the target's, |h - t|^2 / |t|^2, after EAGLE's feature loss (arXiv 2401.15077;
    relative, squared and decaying like the base schedule: our choice): its weighted sum over all blocks,
    and per position [N, K] without gradient. Needs states as wide as the target's."""
    if not settings.state:
        return hidden.new_zeros(()), hidden.new_zeros(valid.shape)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    target = teacher.hidden[teacher.rows].to(wide)
    error = (hidden.to(wide) - target).pow(2).sum(-1) / target.pow(2).sum(-1)
    weights = settings.state * base_schedule(settings, valid.shape[-1]).to(valid.device)
    return (weights * valid * error).sum(), error.detach()


def chunked_vat_loss(
    hidden: Tensor,
    weight: Tensor,
    survival_logits: Tensor,
    teacher: TeacherRows,
    valid: Tensor,
    settings: ObjectiveSettings,
    *,
    rule: AcceptanceRule = greedy_acceptance,
    blocks_per_chunk: int = 64,
    divisor: Tensor | float | None = None,
) -> tuple[Tensor, Monitors]:
    """`vat_loss` from the states before the heads, plus `state_loss`; matrix products run in the dtype of
    `teacher.head`.

    hidden [N, K, D], input of the drafter's head `weight` [C, D]; survival_logits [N, K]; valid bool [N, K]. The sum
    over blocks is divided by `divisor`, given when the blocks are only a part of a step; None: `normaliser` of these
    blocks. Returns the scalar loss and the monitors. Blocks that look at the same teacher rows belong side by side.
    """
    valid = valid.cumprod(-1).bool()
    loss, soft, hard, accepted = _TokenLoss.apply(hidden, weight, teacher, valid, settings, rule, blocks_per_chunk)
    coefficients = loss_factors(accepted, teacher.top_columns, teacher.label_columns, hard.neg().exp(), valid, settings)
    head, head_rows = head_loss(survival_logits, coefficients)
    state, state_rows = state_loss(hidden, teacher, valid, settings)
    monitors = Monitors.of_blocks(
        coefficients, valid, soft, hard, head_rows, survival_logits.detach(), state_rows if settings.state else None
    )
    return (loss + head + state) / (normaliser(valid, settings) if divisor is None else divisor), monitors
