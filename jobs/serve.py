"""`python -m jobs.serve`: the OpenAI-compatible endpoint, until Ctrl-C."""

import time
from typing import Any

from actors.application import check_endpoint, endpoint
from jobs.command import JobContext, run_job
from pipelines.cluster import ray_session
from tierspec.config import Settings

POLL_S = 0.2


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    """Serves until a stop is asked for, then lets running requests finish."""
    check_endpoint(settings)
    with ray_session(settings), endpoint(settings) as running:
        drafts = running.drafter or "the suffix cache alone"
        context.log(f"serving {running.model} at {running.url}/v1, drafts from {drafts}; Ctrl-C stops")
        started = time.monotonic()
        while not context.stop_requested():
            time.sleep(POLL_S)
        return {"url": running.url, "model": running.model, "seconds": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    run_job("serve", main)
