"""Ways to train a drafter, compared on the same data."""

from pipelines.ablation.grid import Trial, plan_ablation
from pipelines.ablation.stage import run_ablation

__all__ = ["Trial", "plan_ablation", "run_ablation"]
