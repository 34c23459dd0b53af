"""`python -m jobs.demo`: the whole line in order, from rollouts to one question answered over HTTP.

Run again, it continues: each stage recognises what is there already and was made with the same settings.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from actors.application import check_endpoint, endpoint
from jobs import rollout
from jobs.command import JobContext, run_job
from pipelines.cluster import ray_session
from pipelines.evaluation import evaluate, finished_report
from pipelines.rollouts import SPLITS
from pipelines.training import train_drafter
from tierspec.artifacts import run_directory
from tierspec.config import Settings
from tierspec.evaluation.memory import MemoryWatch
from tierspec.evaluation.report import render_table

QUESTION = "Name three things that help people sleep well, and say in one sentence each why they help."
ANSWER_TOKENS = 128
STEPS = 4


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    """Runs every stage, or those that are missing; on a stop request it ends behind the stage at hand."""
    check_endpoint(settings)
    clock = _Clock()
    with MemoryWatch() as memory:
        result = _run(settings, context, clock)
    result |= {"seconds": clock.seconds, "peak_memory_gib": round(memory.peak_bytes / 2**30, 2)}
    print(f"\nPeak memory of all processes together: {result['peak_memory_gib']} GiB (proportional set size)")
    return result


def _run(settings: Settings, context: JobContext, clock: "_Clock") -> dict[str, Any]:
    stop = context.stop_requested
    with clock.step("rollouts", "Rollouts: the target answers training and held-out prompts"):
        made = rollout.main(settings, context)
        for split in SPLITS:
            print(f"   {split}: {made[split]['done']} answers, {made[split]['tokens']} tokens")
    if stop():
        return {"stopped_after": "rollouts"}
    with clock.step("training", "Training: a drafter for this target, aware of how it will be verified"):
        rollouts, drafter = run_directory(settings, "rollouts"), context.open_stage(settings, "drafter")
        trained = train_drafter(
            settings, output=drafter, rollouts=rollouts / "train", heldout=rollouts / "heldout", stop=stop
        )
        if not stop():
            accepted = trained["accept_len"]
            measured = "" if accepted is None else f"accept length {accepted:.2f} on held-out prompts after "
            print(f"   {measured}{trained['step']} steps")
    if stop():
        return {"stopped_after": "training"}
    with clock.step("evaluation", "Evaluation: every method on held-out prompts, side by side"):
        report = finished_report(settings, run_directory(settings, "report"))
        if report is None:
            report = evaluate(settings, context.open_stage(settings, "report"), stop, context.log)
    if stop():
        return {"stopped_after": "evaluation"}
    with clock.step("serving", "Serving: an OpenAI-compatible endpoint, and one question to it"):
        answer = ask(settings)
    page = run_directory(settings, "report") / "report.html"
    print(f"\n{render_table(report)}\n\nReport: {page}")
    return {
        "rollout_tokens": made["train"]["tokens"],
        "drafter_accept_len": trained.get("accept_len"),
        "geomean": report["geomean"],
        "geomean_non_looping": report["geomean_non_looping"],
        "report": str(page),
        "answer": answer,
    }


def ask(settings: Settings) -> dict[str, Any]:
    """Starts the endpoint, asks it one question over HTTP, prints the answer and who wrote its tokens, and stops it."""
    key = os.environ.get(settings.serve.api_key_env, "") if settings.serve.api_key_env else ""
    body = {
        "model": settings.target.source,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    with ray_session(settings), endpoint(settings) as served:
        request = urllib.request.Request(
            f"{served.url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        )
        with urllib.request.urlopen(request, timeout=settings.serve.request_timeout_s) as response:
            reply = json.load(response)
    text, written_by = reply["choices"][0]["message"]["content"], reply["tierspec"]["tokens_by_source"]
    print(f"   > {QUESTION}\n\n{_indented(text)}\n")
    print("   tokens written by: " + ", ".join(f"{source} {count}" for source, count in written_by.items()))
    return {
        "question": QUESTION,
        "text": text,
        "tokens_by_source": written_by,
        "accept_len": reply["tierspec"]["accept_len"],
    }


class _Clock:
    """The steps' headers and how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextmanager
    def step(self, name: str, title: str) -> Iterator[None]:
        began = time.monotonic()
        number = len(self.seconds) + 1
        print(f"\n[{number}/{STEPS}] {title}  ({_minutes(began - self._began)} so far)", flush=True)
        yield
        self.seconds[name] = round(time.monotonic() - began, 1)
        print(f"   took {_minutes(self.seconds[name])}", flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    run_job("demo", main)
