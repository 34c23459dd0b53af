"""A run's log: one JSON object per line, written by the first worker, followed by the driver, kept with the drafter.

Kinds of records: `start` (a worker group begins at `step` of `total_steps`), `step` (scalars of an optimizer step) and
`heldout` (accept length on held-out rollouts).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipelines.training.trackers import Tracker
from tierspec.artifacts import atomic_write_text

Record = dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """All whole records of a log; none if it does not exist."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


class RunLog:
    """The log, taken up at `step`: records of later steps, from a run that was lost, go. Its numbers go to the
    trackers too."""

    def __init__(self, path: Path, step: int, trackers: Sequence[Tracker] = ()) -> None:
        kept = [record for record in read_records(path) if record["step"] <= step and record["kind"] != "start"]
        atomic_write_text(path, "".join(f"{json.dumps(record)}\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, kind: str, step: int, scalars: Mapping[str, Any]) -> None:
        """One record, at once on the disk; trackers know its numbers as `kind`/name."""
        self._file.write(json.dumps({"kind": kind, "step": step, **scalars}) + "\n")
        self._file.flush()
        if kind != "start":
            numbers = {f"{kind}/{name}": value for name, value in scalars.items() if isinstance(value, int | float)}
            for tracker in self._trackers:
                tracker.log(numbers, step)

    def close(self) -> None:
        """Flushes all."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


class ProgressBar:
    """The log of a run under way, shown on the terminal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._inode = 0, -1
        self._bar: tqdm | None = None
        self._shown: dict[str, str] = {}

    def poll(self) -> None:
        """Show what has been written since the last call."""
        for record in self._new_records():
            if record["kind"] == "start":
                self.close()
                self._bar = tqdm(
                    desc="training",
                    total=1.0,
                    bar_format="{desc}: {percentage:3.0f}%|{bar:20}| [{elapsed}]{postfix}",
                )
            elif record["kind"] == "heldout":
                self._shown["held-out"] = f"{record['accept_len']:.2f}"
            elif self._bar is not None:
                self._bar.n = record["budget_share"]
                self._shown |= {
                    "step": str(record["step"]),
                    "loss": f"{record['loss']:.2f}",
                    "accept": f"{record['accept_len']:.2f}",
                    "tok/s": f"{record['tokens_per_s']:.0f}",
                    "left": f"{record['seconds_left'] // 60:.0f}:{record['seconds_left'] % 60:02.0f}",
                }
            if self._bar is not None:
                self._bar.set_postfix(self._shown)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def _new_records(self) -> Iterator[Record]:
        try:
            with self._path.open(encoding="utf-8") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                while (line := file.readline()).endswith("\n"):
                    self._offset = file.tell()
                    yield json.loads(line)
        except FileNotFoundError:
            return
