"""The classical acceptance rule of speculative sampling: keep a draft token with probability min(1, p / q), else draw
from the residual (arXiv 2211.17192 section 2.3; arXiv 2302.01318 algorithm 2).

Its output has the target's law for any drafter, but depends on the drafter and on the draws. Served policies use the
keyed choice instead (`tierspec.sampling.choice`); this rule stays for comparison.

Shapes: K draft tokens, V vocabulary. q is the drafter's distribution, p the target's.
"""

import torch
from torch import Tensor

from tierspec.errors import SettingError


def acceptance_probabilities(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """min(1, p / q) of each draft token, `[..., K]`, `[..., K, V]`, `[..., K, V]` -> float64 `[..., K]`.

    A token that the drafter could not have drawn (q = 0) counts as certain if the target allows it, else as impossible.
    """
    q = draft_probs.double().gather(-1, draft_ids[..., None])[..., 0]
    p = target_probs.double().gather(-1, draft_ids[..., None])[..., 0]
    return torch.where(p >= q, (p > 0).double(), p / q)


def residual(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """The law of the token that replaces a rejected one: max(p - q, 0), normalised; `[..., V]` -> float64 `[..., V]`.

    Where p never exceeds q nothing is ever rejected but by rounding, and p itself is returned.
    """
    excess = (target_probs.double() - draft_probs.double()).clamp_min(0.0)
    mass = excess.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, target_probs.double())


def rejection_sample(
    draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Verify one chain: `[K]`, `[K, V]`, `[K + 1, V]` -> (draft tokens accepted, the token that follows them).

    Rows are probabilities after temperature and truncation, position by position; the last target row follows the whole
    draft. `generator` lives on the CPU. Raises `SettingError` if the shapes disagree.
    """
    depth, vocabulary = target_probs.shape[0] - 1, target_probs.shape[1]
    if draft_ids.shape != (depth,) or draft_probs.shape != (depth, vocabulary):
        raise SettingError(
            f"draft_probs: expected [K, V] and target_probs [K + 1, V] for K draft_ids, not {list(draft_probs.shape)}, "
            f"{list(target_probs.shape)} and {list(draft_ids.shape)}"
        )
    keep = acceptance_probabilities(draft_ids, draft_probs, target_probs[:-1]).cpu()
    rejected = (torch.rand(depth, dtype=torch.float64, generator=generator) >= keep).nonzero()
    accepted = int(rejected[0, 0]) if len(rejected) else depth
    law = residual(draft_probs[accepted], target_probs[accepted]) if accepted < depth else target_probs[depth].double()
    return accepted, int(torch.multinomial(law.cpu(), 1, generator=generator))
