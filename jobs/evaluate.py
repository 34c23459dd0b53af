"""`python -m jobs.evaluate`: measure the methods of a run side by side and write its report."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.evaluation import check_evaluation, evaluate
from tierspec.config import Settings
from tierspec.evaluation.report import render_table


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    check_evaluation(settings)
    output = context.open_stage(settings, "report")
    report = evaluate(settings, output, context.stop_requested, context.log)
    print(render_table(report))
    return report | {"page": str(output / "report.html")}


if __name__ == "__main__":
    run_job("evaluate", main)
