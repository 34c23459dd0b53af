"""Drafter training on Ray Train and DeepSpeed."""

from pipelines.training.plan import TrainingPlan, plan_training, read_heldout, walkable
from pipelines.training.stage import train_drafter

__all__ = ["TrainingPlan", "plan_training", "read_heldout", "train_drafter", "walkable"]
