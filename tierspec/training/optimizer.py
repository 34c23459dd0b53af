"""The optimizer and the learning rate over a run."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from tierspec.config import TrainingSettings
from tierspec.errors import SettingError


class GroupClippedAdamW(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101) that clips the gradient norm of every parameter group by itself before stepping.

    With `partitioned` the parameters are this rank's shares (ZeRO), so squared norms are summed over ranks.
    """

    def __init__(self, groups: list[dict], settings: TrainingSettings, *, partitioned: bool = False) -> None:
        super().__init__(
            groups, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self._limit, self._rate = settings.gradient_clip, settings.learning_rate
        self._partitioned = partitioned
        self.gradient_norms: dict[str, float] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Clip, then step; `gradient_norms` holds the norms before clipping, by group name.

        Raises:
            SettingError: a norm is not finite; no weight of its group has changed.
        """
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if gradients:  # ZeRO-3 steps group by group, the others being empty
                norm = self._norm(gradients)
                if not math.isfinite(norm):
                    raise SettingError(
                        f"training.learning_rate is {self._rate:g}: the gradient of {group['name']} is not finite; "
                        "lower it"
                    )
                self.gradient_norms[group["name"]] = norm
                if norm > self._limit:
                    torch._foreach_mul_(gradients, self._limit / norm)
        super().step(closure)

    def _norm(self, gradients: list[Tensor]) -> float:
        square = torch.stack([torch.linalg.vector_norm(g).double().square() for g in gradients]).sum()
        if self._partitioned:
            dist.all_reduce(square)
        return math.sqrt(float(square))


def learning_rate(progress: float, settings: TrainingSettings) -> float:
    """Rate at a share 0 <= `progress` <= 1 of a run: linear warm-up, then the schedule; all but constant end at 0."""
    if progress < settings.warmup_ratio:
        return settings.learning_rate * progress / settings.warmup_ratio
    left = (1.0 - progress) / max(1e-9, 1.0 - settings.warmup_ratio)
    factors = {
        "constant": 1.0,
        "linear": left,
        "cosine": 0.5 * (1.0 - math.cos(math.pi * left)),
        "wsd": min(1.0, (1.0 - progress) / max(1e-9, settings.decay_ratio)),
    }
    return settings.learning_rate * factors[settings.schedule]
