"""`python -m jobs.train`: train a drafter on the rollouts of a run."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.training import plan_training, train_drafter
from pipelines.training.forecast import forecast, render_forecast
from tierspec.artifacts import run_directory
from tierspec.config import Settings


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    plan = plan_training(settings, output=run_directory(settings, "drafter"))
    if "plan" in context.flags:
        expected = forecast(settings, plan.samples)
        print(render_forecast(expected))
        return expected
    output = context.open_stage(settings, "drafter")
    return train_drafter(settings, output=output, stop=context.stop_requested)


if __name__ == "__main__":
    run_job("train", main, {"plan": "measure a few steps, print what the run will need, and stop"})
