"""Rollouts: the target's own answers, in shards that survive being interrupted."""

from pipelines.rollouts.plan import SPLITS
from pipelines.rollouts.schema import SCHEMA, read_rollouts
from pipelines.rollouts.stage import check_rollouts, make_rollouts, read_prompt_set

__all__ = ["SCHEMA", "SPLITS", "check_rollouts", "make_rollouts", "read_prompt_set", "read_rollouts"]
