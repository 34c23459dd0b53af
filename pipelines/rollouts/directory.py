"""A directory of rollouts that may be left and taken up again: finished shards stay, and settings must not change."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.rollouts.schema import ShardReport, read_report, shard_path
from tierspec.artifacts import atomic_write_json, read_object, sweep_temporaries
from tierspec.errors import ArtifactError, SettingError

MANIFEST = "manifest.json"


def refuse_changes(path: Path, identity: Mapping[str, Any]) -> None:
    """SettingError if the rollouts in `path` were made under another `identity`, which may be a part of the whole."""
    difference = _difference(path, identity)
    if difference:
        raise SettingError(
            f"{difference} in {path}; use another run.name, or rollout.overwrite=true to make these rollouts anew"
        )


def _difference(path: Path, identity: Mapping[str, Any]) -> str:
    """What differs from the rollouts that are there, as the start of a message; "" if nothing does."""
    if not (path / MANIFEST).exists():
        return f"shards without {MANIFEST}" if any(path.glob("shard-*.parquet")) else ""
    made_with = read_object(path / MANIFEST).get("identity")
    if not isinstance(made_with, dict):
        return f"a {MANIFEST} that is not one of rollouts"
    for name, value in identity.items():
        if made_with.get(name) != value:
            return f"{name} is {value!r} now, but was {made_with.get(name)!r} for the rollouts"
    return ""


class RolloutDirectory:
    """Shards made under one identity: what an answer depends on, by the name of the setting it comes from."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Check `path` against `identity`, and open it: sweep what a killed run left half-written.

        Raises:
            SettingError: the directory holds rollouts of another identity and `overwrite` is not set.
            ArtifactError: a finished shard is not of this directory.
        """
        self.path = path
        self.fingerprint = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
        if not overwrite:
            refuse_changes(path, identity)
        path.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(path)
        if _difference(path, identity):
            for file in (*path.glob("shard-*.parquet"), *path.glob("*.json*")):
                file.unlink()
        atomic_write_json(path / MANIFEST, {"fingerprint": self.fingerprint, "identity": dict(identity)})
        self.finished = self._finished_shards()

    def _finished_shards(self) -> dict[int, ShardReport]:
        finished: dict[int, ShardReport] = {}
        for path in sorted(self.path.glob("shard-*.parquet")):
            try:
                report = read_report(path)
            except ArtifactError:
                path.unlink()
                continue
            if report.fingerprint != self.fingerprint or path != shard_path(self.path, report.shard):
                raise ArtifactError(f"{path} was made with other settings: move it away")
            finished[report.shard] = report
        return finished
