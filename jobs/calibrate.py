"""`python -m jobs.calibrate`: measure how long the neural drafter's drafts should be, and where they should stop."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.calibration import calibrate
from pipelines.evaluation import drafter_directory
from tierspec.config import Settings
from tierspec.evaluation.calibration import Candidate, rows
from tierspec.evaluation.report import aligned


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    drafter_directory(settings)
    result = calibrate(settings, context.open_stage(settings, "calibration"), context.stop_requested, context.log)
    print(aligned(rows([Candidate(**candidate) for candidate in result["candidates"]])))
    kept = "nothing is surely faster than the present " if result["fastest"] == result["present"] else "fastest: "
    print(kept + result["fastest"])
    return result


if __name__ == "__main__":
    run_job("calibrate", main)
