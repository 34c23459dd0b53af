"""Timing shared by the benchmarks."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def median_seconds(
    work: Callable[[], Any], *, repeats: int, warm_up: int = 3, device: torch.device | None = None
) -> float:
    """Median wall clock of `work`, which must leave things as it found them; a GPU is waited for."""
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def write_result(path: str | None, result: dict[str, Any]) -> None:
    """`result` as JSON into a file, if one is wanted."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
