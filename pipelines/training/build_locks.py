"""PyTorch marks the build of an extension with a file and waits, for ever, while there is one; a build that was killed
leaves it behind."""

import logging
import time
from pathlib import Path

import psutil
from filelock import FileLock

_LEFT_S = 60.0  # a lock that no process of this machine holds may be another machine's, on a shared disk
_POLL_S = 0.5
_log = logging.getLogger(__name__)


def release_left_locks(extensions: Path, left_s: float = _LEFT_S) -> None:
    """Remove the locks of builds that were killed; waits until it is certain that they were."""
    extensions.mkdir(parents=True, exist_ok=True)
    for lock in sorted(extensions.glob("*/lock")):
        told = False
        while _exists_for(lock) is not None and not _is_open(lock):
            with FileLock(extensions / ".release.lock"):
                age = _exists_for(lock)
                if age is None or _is_open(lock):
                    break
                if age > left_s:
                    lock.unlink(missing_ok=True)
                    break
            if not told:
                _log.warning("%s is left of a build that was killed, or of another machine's: waiting", lock)
                told = True
            time.sleep(_POLL_S)


def _exists_for(lock: Path) -> float | None:
    """Age in seconds; None if it is gone."""
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_open(path: Path) -> bool:
    """Whether a process of this machine holds it; its owner has it open all the time."""
    wanted = str(path.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == wanted for file in process.open_files()):
                return True
        except psutil.Error:
            continue
    return False
