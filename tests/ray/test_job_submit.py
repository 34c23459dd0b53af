"""The jobs as `ray job submit` runs them: against a head node of their own, from a working directory that Ray ships."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

ROOT = Path(__file__).parents[2]
EXCLUDES = [".git", ".venv", "runs", "tests", "docs", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache"]
START_S, JOB_S = 90, 300


def free_ports(count: int) -> list[int]:
    # Below 10002: Ray hands the ports from there on to its workers.
    found: list[int] = []
    for port in range(6400 + os.getpid() % 1000, 10000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[JobSubmissionClient, int]]:
    """A head node, and a port that it leaves free."""
    gcs, dashboard, client, agent, metrics, dashboard_grpc, serve = free_ports(7)
    folder = tmp_path_factory.mktemp("r")
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=4", f"--port={gcs}"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--metrics-export-port={metrics}", f"--dashboard-agent-grpc-port={dashboard_grpc}"]
    command += ["--object-store-memory=200000000", f"--temp-dir={folder}", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    log = (folder / "head.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        yield connect(f"http://127.0.0.1:{dashboard}", process), serve
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def connect(address: str, process: subprocess.Popen[bytes]) -> JobSubmissionClient:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{address}/api/version").status_code == 200:
                return JobSubmissionClient(address)
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError("the head node did not start")


def submit(client: JobSubmissionClient, job: str, *overrides: str) -> str:
    return client.submit_job(
        entrypoint=f"{sys.executable} -m jobs.{job} --config configs/tiny.yaml --json {' '.join(overrides)}",
        runtime_env={"working_dir": str(ROOT), "excludes": EXCLUDES},
    )


def wait(client: JobSubmissionClient, job: str, *wanted: JobStatus) -> None:
    deadline = time.monotonic() + JOB_S
    while (status := client.get_job_status(job)) not in wanted:
        if status.is_terminal() or time.monotonic() > deadline:
            raise AssertionError(f"job is {status}:\n{client.get_job_logs(job)}")
        time.sleep(0.5)


def test_the_whole_line_then_serving_until_stopped(head: tuple[JobSubmissionClient, int], tmp_path: Path) -> None:
    client, port = head
    overrides = (f"run.root={tmp_path}", f"serve.port={port}")
    demo = submit(client, "demo", *overrides)
    wait(client, demo, JobStatus.SUCCEEDED)
    result = json.loads(client.get_job_logs(demo).strip().splitlines()[-1])
    assert result["rollout_tokens"] > 0
    shown = sorted(p.name for p in (tmp_path / "tiny").iterdir() if not p.name.startswith("."))
    assert shown == ["drafter", "report", "rollouts", "training"]

    serving = submit(client, "serve", *overrides)
    wait(client, serving, JobStatus.RUNNING)
    body = {"model": "embedded:tiny", "prompt": "Hi", "max_tokens": 8}
    deadline = time.monotonic() + START_S
    while True:
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
            if answer.status_code != 404:  # the proxy is up before it knows the application's routes
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, client.get_job_logs(serving)
        time.sleep(0.5)
    assert answer.json()["usage"]["completion_tokens"] == 8
    client.stop_job(serving)
    wait(client, serving, JobStatus.STOPPED, JobStatus.FAILED)
