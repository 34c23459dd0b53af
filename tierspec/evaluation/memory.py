"""Memory of a whole process tree, by proportional set size: a page shared by n processes counts 1/n in each.

Summed resident sizes would count Ray's shared-memory store and every shared library once per process.
"""

import os
import threading
from pathlib import Path
from types import TracebackType

Process = tuple[int, str]
"""A process id and its start time, which together survive the reuse of ids."""


class MemoryWatch:
    """Samples this process and its descendants in a background thread; `peak_bytes` is the largest sum seen.

    A descendant that is handed over to init when its parent ends stays counted. Where /proc has no smaps_rollup
    (anything but Linux) the peak stays 0.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        self.peak_bytes = 0
        self._known: set[Process] = set()
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.sample()

    def sample(self) -> int:
        """Bytes in use now by the tree."""
        self._known = _descendants(os.getpid(), self._known)
        total = sum(_proportional_bytes(pid) for pid, _ in self._known)
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.sample()


def _descendants(root: int, known: set[Process]) -> set[Process]:
    parents: dict[Process, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[(int(entry.name), fields[19])] = int(fields[1])
    tree = {process for process in parents if process[0] == root or process in known}
    ids = {pid for pid, _ in tree}
    while True:
        found = {process for process, parent in parents.items() if parent in ids and process not in tree}
        if not found:
            return tree
        tree |= found
        ids |= {pid for pid, _ in found}


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)
