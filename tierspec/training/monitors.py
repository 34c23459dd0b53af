"""What a training run watches about the objective (our choice): sums that add over chunks, micro-batches and ranks."""

from typing import Self

import torch
from torch import Tensor

from tierspec.training.factors import Coefficients

NAMES = (
    *(
        "valid",
        "reached",
        "survived",
        "late",
        "differs",
        "soft_count",
        "soft",
        "hard_count",
        "hard",
        "head",
        "state_count",
        "state",
    ),
    *("pairs", "ordered_pairs"),
)


class Monitors:
    """Sums per draft position, float64 [len(NAMES), K], detached.

    soft, hard and head are cross-entropies in nats, state is a relative squared error; pairs and ordered_pairs count
    (survivor, non-survivor) pairs of one batch and those the head ranks correctly, from which its AUC follows.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    @classmethod
    @torch.no_grad()
    def of_blocks(
        cls,
        coefficients: Coefficients,
        valid: Tensor,
        soft: Tensor,
        hard: Tensor,
        head: Tensor,
        survival_logits: Tensor,
        state: Tensor | None = None,
    ) -> Self:
        """Every argument [..., K]; `coefficients` as `loss_factors` returns them; `state` as `state_loss`
        does, None if it is no part of the loss."""
        valid = valid.cumprod(-1).bool()
        soft_on, hard_on = coefficients.soft > 0, coefficients.hard > 0
        before = torch.ones_like(valid)
        before[..., 1:] = coefficients.survived[..., :-1]
        rows = (
            valid,
            valid & before,
            coefficients.survived,
            coefficients.late,
            coefficients.differs,
            soft_on,
            soft * soft_on,
            hard_on,
            hard * hard_on,
            head * valid,
            torch.zeros_like(valid) if state is None else valid,
            torch.zeros_like(head) if state is None else state * valid,
        )
        depth = valid.shape[-1]
        sums = [row.double().reshape(-1, depth).sum(0) for row in rows]
        ranking = [
            _ordered_pairs(scores[mask], labels[mask])
            for scores, labels, mask in zip(
                *(t.reshape(-1, depth).unbind(-1) for t in (survival_logits, coefficients.survived, valid)), strict=True
            )
        ]
        return cls(torch.stack([*sums, *torch.stack(ranking, -1)]))

    def __add__(self, other: "Monitors") -> "Monitors":
        return Monitors(self.sums + other.sums)

    def scalars(self) -> dict[str, float]:
        """Means for a log. accept_len counts the bonus token (glossary) and is a little low, since blocks at the ends
        of responses are shorter than K; `name/k` is draft position k, 1-based; accepted/k = P(position k survives |
        reached), the rest are means over positions where the term exists.
        disagreement is the share of positions where the target's likeliest token is not the corpus token: with greedy
        rollouts of the same target it is rounding alone."""
        sums = dict(zip(NAMES, self.sums.tolist(), strict=True))
        blocks = max(sums["valid"][0], 1.0)
        scalars = {
            "accept_len": 1.0 + sum(sums["survived"]) / blocks,
            "late_matches": sum(sums["late"]) / blocks,
            "disagreement": sum(sums["differs"]) / max(1.0, sum(sums["valid"])),
        }
        for name, counts, totals in (
            ("accepted", sums["reached"], sums["survived"]),
            ("survived", sums["valid"], sums["survived"]),
            ("soft", sums["soft_count"], sums["soft"]),
            ("hard", sums["hard_count"], sums["hard"]),
            ("head_bce", sums["valid"], sums["head"]),
            ("state", sums["state_count"], sums["state"]),
            ("head_auc", sums["pairs"], sums["ordered_pairs"]),
        ):
            scalars |= {
                f"{name}/{k}": total / count
                for k, (total, count) in enumerate(zip(totals, counts, strict=True), start=1)
                if count
            }
        return scalars


def _ordered_pairs(scores: Tensor, labels: Tensor) -> Tensor:
    """(number of pairs of a true and a false label, those where the true one scores higher; a tie is half)."""
    negatives = scores[~labels].sort().values
    positives = scores[labels].contiguous()
    below = torch.searchsorted(negatives, positives) + torch.searchsorted(negatives, positives, right=True)
    pairs = torch.tensor(float(positives.numel() * negatives.numel()), dtype=torch.float64, device=scores.device)
    return torch.stack([pairs, below.sum().double() / 2])
