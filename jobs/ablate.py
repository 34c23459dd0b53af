"""`python -m jobs.ablate`: train the same drafter in several ways on a run's rollouts and compare accept lengths."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.ablation import plan_ablation, run_ablation
from tierspec.artifacts import run_directory
from tierspec.config import Settings
from tierspec.evaluation.ablation import render_ablation_table


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    folder = settings.ablation.folder
    plan_ablation(settings, run_directory(settings, folder))
    output = context.open_stage(settings, folder)
    comparison = run_ablation(settings, output, context.stop_requested, context.log)
    print(render_ablation_table(comparison))
    return comparison | {"page": str(output / "ablation.html")}


if __name__ == "__main__":
    run_job("ablate", main)
