"""From the outcome of the simulated verification to the constants of the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tierspec.config import ObjectiveSettings
from tierspec.training.simulation import survival
from tierspec.training.weighting import position_weights


@dataclass(frozen=True)
class Coefficients:
    """Outcome of the simulated verification as constants of the loss, every field [..., K].

    survived: bool, the head's label; late: bool, a match after the first rejection; differs: bool, the target's
    likeliest token is not the corpus token; soft, hard, head: factor of each position's cross-entropies in the block's
    loss.
    """

    survived: Tensor
    late: Tensor
    differs: Tensor
    soft: Tensor
    hard: Tensor
    head: Tensor


@torch.no_grad()
def loss_factors(
    accepted: Tensor,
    top_columns: Tensor,
    label_columns: Tensor,
    label_probability: Tensor,
    valid: Tensor,
    settings: ObjectiveSettings,
) -> Coefficients:
    """What follows for the loss from the outcome of the simulated verification.

    accepted: bool [..., K], what the acceptance rule says of each position by itself; top_columns, label_columns: int64
    [..., K], draft columns of the target's choice and of the corpus token (-1: outside the draft vocabulary);
    label_probability: [..., K], what the drafter gives the corpus token; valid: bool [..., K].
    """
    valid = valid.cumprod(-1).bool()
    survived = survival(accepted, valid)
    weights = position_weights(accepted, label_probability * (label_columns >= 0), valid, settings)
    length = valid.sum(-1, keepdim=True).clamp_min(1)
    beta = settings.head_beta if settings.head else 0.0
    return Coefficients(
        survived=survived,
        late=accepted & valid & ~survived,
        differs=valid & (top_columns != label_columns),
        soft=weights * (valid & (top_columns >= 0)) * float(settings.soft),
        hard=weights * (valid & (label_columns >= 0)) * float(settings.hard),
        head=valid * (beta / length),
    )
