"""Drafter training on Ray Train and DeepSpeed."""

from pipelines.training.stage import TrainingPlan, plan_training, read_heldout, train_drafter, walkable

__all__ = ["TrainingPlan", "plan_training", "read_heldout", "train_drafter", "walkable"]
