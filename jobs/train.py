"""`python -m jobs.train`: train a drafter on the rollouts of a run."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.training import plan_training, train_drafter
from tierspec.artifacts import run_directory
from tierspec.config import Settings


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    plan_training(settings, output=run_directory(settings, "drafter"))
    output = context.open_stage(settings, "drafter")
    return train_drafter(settings, output=output, stop=context.stop_requested)


if __name__ == "__main__":
    run_job("train", main)
