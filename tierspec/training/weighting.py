"""Weights of the K draft positions of a block: a base schedule, and what simulated verification makes of it.

A weight is a constant of the gradient. Legend: k* is the first rejected position, 1-based, K + 1 if there is none.
"""

import torch
from torch import Tensor

from tierspec.config import ObjectiveSettings
from tierspec.training.simulation import first_rejection

_DPACE_FLOOR = 0.5


def base_schedule(settings: ObjectiveSettings, depth: int) -> Tensor:
    """Position weights w_1..w_K before any adaptation, float32 [K]; w_1 = 1.

    geometric decay^(k-1) (EAGLE-3, arXiv 2503.01840), exponential exp(-(k-1) / gamma) (DFlash, arXiv 2602.06036), or
    uniform.
    """
    positions = torch.arange(depth, dtype=torch.float32)
    if settings.schedule == "exponential":
        return torch.exp(-positions / settings.gamma)
    return (1.0 if settings.schedule == "uniform" else settings.decay) ** positions


def adaptive_weights(first_rejection: Tensor, base: Tensor) -> Tensor:
    """Weight 1 through the first rejection, then the base schedule from its start (arXiv 2608.30135 section 4.3).

    first_rejection: int64 [...], 1-based, K + 1 if none; base: [K] with base[0] = 1. Returns [..., K], dtype of base.
    """
    positions = torch.arange(1, base.shape[0] + 1, device=base.device)
    return base[(positions - first_rejection[..., None]).clamp_min(0)]


def cutoff_weights(first_rejection: Tensor, base: Tensor) -> Tensor:
    """The base schedule through the first rejection, which is kept, and 0 behind it (arXiv 2607.01893). [..., K]."""
    positions = torch.arange(1, base.shape[0] + 1, device=base.device)
    return base * (positions <= first_rejection[..., None])


def dpace_weights(label_probability: Tensor, valid: Tensor) -> Tensor:
    """Sum over m >= k of the product of c_1..c_m, c_i = (1 + q_i) / 2 (D-PACE, arXiv 2605.18810): how much of the
    expected length hangs on position k.

    label_probability [..., K]: what the drafter gives the corpus token; valid: bool [..., K], a prefix. Returns float32
    [..., K].
    """
    confidence = (1.0 - _DPACE_FLOOR) * label_probability.float() + _DPACE_FLOOR
    reached = (confidence * valid).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def position_weights(accepted: Tensor, label_probability: Tensor, valid: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Weights that `settings.weighting` and `settings.schedule` ask for: [..., K], or [K] where blocks do not differ.

    accepted: bool [..., K], the outcome of the acceptance rule; label_probability as in `dpace_weights`; valid: bool
    [..., K], a contiguous prefix.
    """
    base = base_schedule(settings, valid.shape[-1]).to(valid.device)
    match settings.weighting:
        case "fixed":
            return base
        case "adaptive":
            return adaptive_weights(first_rejection(accepted, valid), base)
        case "cutoff":
            return cutoff_weights(first_rejection(accepted, valid), base)
        case "d-pace":
            return dpace_weights(label_probability, valid)
