import os
import subprocess
import sys

import pytest

from tierspec.evaluation.memory import MemoryWatch, _descendants

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")


def test_children_count_and_stay_counted_when_their_parent_ends():
    grandchild = "import time; held = bytearray(64 << 20); print('ready', flush=True); time.sleep(60)"
    child = (
        "import subprocess, sys\n"
        f"process = subprocess.Popen([sys.executable, '-c', {grandchild!r}], stdout=subprocess.PIPE, text=True)\n"
        "process.stdout.readline(); print(process.pid, flush=True); sys.stdin.readline()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    grandchild_pid = int(parent.stdout.readline())
    try:
        watch = MemoryWatch(interval_s=60)
        before = watch.sample()
        assert before > 64 << 20
        parent.communicate("\n")
        assert grandchild_pid in {pid for pid, _ in watch._known}
        assert watch.sample() > 64 << 20
    finally:
        os.kill(grandchild_pid, 9)
    assert watch.peak_bytes >= before


def test_the_watch_samples_on_its_own_and_once_at_its_end():
    with MemoryWatch(interval_s=0.01) as watch:
        held = bytearray(b"x") * (32 << 20)
    assert watch.peak_bytes > len(held)


def test_processes_of_others_do_not_count():
    assert 1 not in {pid for pid, _ in _descendants(os.getpid(), set())}
