"""`python -m jobs.rollout`: let the target answer the training and the held-out prompts of a run."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.cluster import ray_session
from pipelines.rollouts import SPLITS, check_rollouts, make_rollouts
from tierspec.artifacts import atomic_write_json, run_directory
from tierspec.config import Settings


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    directory = run_directory(settings, "rollouts")
    for split in SPLITS:
        check_rollouts(settings, split=split, output=directory / split)
    context.open_stage(settings, "rollouts")
    result: dict[str, Any] = {"output": str(directory)}
    with ray_session(settings):
        for split in SPLITS:
            result[split] = make_rollouts(settings, split=split, output=directory / split, stop=context.stop_requested)
            result[f"{split}_tokens"] = result[split]["tokens"]
    atomic_write_json(directory / "result.json", result)
    return result


if __name__ == "__main__":
    run_job("rollout", main)
