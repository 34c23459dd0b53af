"""Torch threads. The number belongs to the calling thread, so it is set on the one that computes; Ray gives a process
with a fraction of a CPU one thread unless told otherwise."""

from __future__ import annotations

import os

import torch


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int, *, processes: int = 1) -> int:
    """`threads`, or if that is 0 an equal share of the usable cores for each of `processes`."""
    return threads or max(1, usable_cores() // processes)


def use_threads(threads: int, *, processes: int = 1) -> int:
    """Sets and returns the calling thread's torch threads, as `thread_count` counts them."""
    count = thread_count(threads, processes=processes)
    torch.set_num_threads(count)
    return count
