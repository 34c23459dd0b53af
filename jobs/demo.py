"""`python -m jobs.demo`: the whole line in order, from rollouts to one question answered over HTTP.

Run again, it continues: a stage whose result is there, made with the settings it depends on, is not repeated.
"""

import json
import os
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from actors.application import check_endpoint, endpoint
from jobs.cluster import ray_session
from jobs.command import JobContext, run_job
from pipelines.evaluation import evaluate
from pipelines.rollouts import make_rollouts
from pipelines.training import train_drafter
from tierspec.artifacts import read_json, run_directory
from tierspec.config import Settings
from tierspec.evaluation.memory import MemoryWatch
from tierspec.evaluation.report import render_table

QUESTION = "Name three things that help people sleep well, and say in one sentence each why they help."
ANSWER_TOKENS = 128
STEPS = 5

ROLLOUT_GROUPS = ("run", "target", "prompts", "rollout")
DRAFTER_GROUPS = (*ROLLOUT_GROUPS, "drafter", "training")
REPORT_GROUPS = (*DRAFTER_GROUPS, "draft", "decoding", "evaluation")


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    check_endpoint(settings)
    with MemoryWatch() as memory:
        line = _Line(settings, context)
        result = _run(line)
    result |= {"seconds": line.seconds, "peak_memory_gib": round(memory.peak_bytes / 2**30, 2)}
    print(f"\nPeak memory of all processes together: {result['peak_memory_gib']:.2f} GiB (proportional set size)")
    return result


def _run(line: "_Line") -> dict[str, Any]:
    settings, stop = line.settings, line.context.stop_requested
    rollouts = line.stage(
        "Rollouts: the target answers the training prompts",
        "rollouts",
        ROLLOUT_GROUPS,
        lambda directory: make_rollouts(settings, split="train", output=directory, stop=stop),
    )
    if stop():
        return {"stopped_after": "rollouts"}
    print(f"   {rollouts['done']} answers, {rollouts['tokens']} tokens")
    line.stage(
        "Held-out rollouts: what the drafter is measured on while it trains",
        "rollouts/heldout",
        ROLLOUT_GROUPS,
        lambda directory: make_rollouts(settings, split="heldout", output=directory, stop=stop),
    )
    if stop():
        return {"stopped_after": "held-out rollouts"}
    drafter = line.stage(
        "Training: a drafter for this target, aware of how it is verified",
        "drafter",
        DRAFTER_GROUPS,
        lambda directory: train_drafter(settings, output=directory, stop=stop),
    )
    if stop():
        return {"stopped_after": "training"}
    line.stage(
        "Evaluation: every method on the held-out prompts, side by side",
        "report",
        REPORT_GROUPS,
        lambda directory: evaluate(settings, directory, stop, line.context.log),
    )
    if stop():
        return {"stopped_after": "evaluation"}
    line.header("Serving: an OpenAI-compatible endpoint, and one question to it")
    answer = ask(settings)
    line.done("serve")

    report = read_json(run_directory(settings, "report") / "report.json")
    page = run_directory(settings, "report") / "report.html"
    print(f"\n{render_table(report)}\n\nReport: {page}")
    return {
        "rollout_tokens": rollouts["tokens"],
        "training": drafter,
        "geomean": report["geomean"],
        "geomean_non_looping": report["geomean_non_looping"],
        "report": str(page),
        **answer,
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
    return {"answer": text, "tokens_by_source": written_by, "accept_len": reply["tierspec"]["accept_len"]}


class _Line:
    """The steps in order, their headers and their time. Once a stage has run, those behind it run again."""

    def __init__(self, settings: Settings, context: JobContext) -> None:
        self.settings, self.context = settings, context
        self.seconds: dict[str, float] = {}
        self._step, self._stale = 0, False
        self._began = self._step_began = time.monotonic()

    def header(self, title: str) -> None:
        self._step += 1
        self._step_began = time.monotonic()
        print(f"\n[{self._step}/{STEPS}] {title}  ({_clock(self._step_began - self._began)} elapsed)", flush=True)

    def done(self, name: str) -> None:
        self.seconds[name] = round(time.monotonic() - self._step_began, 1)
        print(f"   took {_clock(self.seconds[name])}", flush=True)

    def stage(
        self, title: str, name: str, groups: tuple[str, ...], work: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        self.header(title)
        directory = run_directory(self.settings, name)
        finished = None if self._stale else finished_result(directory, self.settings, groups)
        if finished is not None:
            print(f"   already done: {directory}")
            return finished
        self._stale = True
        (directory / "result.json").unlink(missing_ok=True)
        self.context.open_stage(self.settings, name)
        result = work(directory)
        self.done(name)
        return result


def finished_result(directory: Path, settings: Settings, groups: tuple[str, ...]) -> dict[str, Any] | None:
    """The stage's result.json if it is there and `groups` of its run.yaml are those of `settings`; None to run it."""
    try:
        result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        made_with = yaml.safe_load((directory / "run.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    now = settings.model_dump(mode="json")
    same = all(made_with.get(group) == now[group] for group in groups)
    return result if same and result.get("ended_early") != "stopped" else None


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    run_job("demo", main)
