"""Drafter training on Ray Train and DeepSpeed."""

from pipelines.training.stage import TrainingPlan, plan_training, train_drafter

__all__ = ["TrainingPlan", "plan_training", "train_drafter"]
