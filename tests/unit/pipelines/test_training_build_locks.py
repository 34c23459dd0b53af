import os
import time
from pathlib import Path

from pipelines.training.build_locks import release_left_locks


def lock_of(extensions: Path, name: str, age_s: float) -> Path:
    lock = extensions / name / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    then = time.time() - age_s
    os.utime(lock, (then, then))
    return lock


def test_locks_of_killed_builds_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    left, running = lock_of(tmp_path, "left", 1000.0), lock_of(tmp_path, "running", 1000.0)
    with running.open():
        release_left_locks(tmp_path)
        assert not left.exists() and running.exists()
    release_left_locks(tmp_path)
    assert not running.exists()


def test_a_young_lock_is_waited_for(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "young", 0.0)
    release_left_locks(tmp_path, left_s=0.6)
    assert not lock.exists()
