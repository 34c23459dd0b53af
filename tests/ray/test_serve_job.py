"""`python -m jobs.serve` as a user runs it: one line for a port that is taken, a stream that survives Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


def start(*overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jobs.serve", "--config", "configs/tiny.yaml", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = start(f"serve.port={port}", f"run.root={tmp_path}")
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    assert errors == f"serve: serve.port: {port} on 127.0.0.1 is taken; choose another or stop what uses it\n"
    assert not list(tmp_path.iterdir())


def test_running_requests_finish_after_ctrl_c(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = start(f"serve.port={port}", f"run.root={tmp_path}")
    try:
        wait_until_served(job, port)
        body = {"model": "embedded:tiny", "prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(job.pid, signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert job.wait(60) == 130
    finally:
        job.kill()
        job.wait()


def wait_until_served(job: subprocess.Popen[str], port: int) -> None:
    assert job.stderr is not None
    said = []
    for line in job.stderr:
        said.append(line)
        if f"http://127.0.0.1:{port}/v1" in line:
            break
    else:
        raise AssertionError("".join(said))
    threading.Thread(target=job.stderr.read, daemon=True).start()
