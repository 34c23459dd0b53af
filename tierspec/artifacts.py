"""Run directories: where a stage keeps its files, how they appear all at once, and where they came from.

A file or directory under construction lives beside its final name as `.<name>.tmp-<pid>-<random>` and is renamed when
complete, so a killed run leaves nothing that could be taken for a finished artifact. The next run of the stage sweeps
such leftovers. `runs/<name>/<stage>/` is where a stage keeps its results.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tierspec
from tierspec.config import Settings
from tierspec.errors import ArtifactError, SettingError
from tierspec.paths import user_path

_TEMPORARY = re.compile(r"^\..+\.tmp-(\d+)-[0-9a-f]{8}$")
_PACKAGES = ("torch", "ray", "deepspeed", "transformers", "tokenizers", "safetensors", "pyarrow", "pydantic", "numpy")


def run_directory(settings: Settings, stage: str) -> Path:
    """`<run.root>/<run.name>/<stage>`; a name only, nothing is created."""
    return user_path(settings.run.root, "run.root") / settings.run.name / stage


def write_provenance(directory: Path, settings: Settings, argv: Sequence[str]) -> None:
    """Open a stage: make `directory`, sweep leftovers of killed runs, write run.yaml, command.txt and versions.json."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(directory)
        atomic_write_text(directory / "run.yaml", settings.to_yaml())
        atomic_write_text(directory / "command.txt", shlex.join(argv) + "\n")
        atomic_write_json(directory / "versions.json", {"git": git_revision(), "versions": versions()})
    except OSError as error:
        raise SettingError(f"cannot write to {directory}: {error.strerror} (setting run.root)") from error


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` in UTF-8."""
    atomic_write_bytes(path, text.encode())


def atomic_write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON; NaN and infinity are refused, since other readers would."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary sibling to fill; it becomes `path` when the block ends, replacing what was there.

    If the block raises, the sibling is removed and `path` stays as it was.
    """
    temporary, retired = temporary_directory(path), _temporary(path)
    try:
        yield temporary
        if path.exists():
            os.rename(path, retired)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def temporary_directory(path: Path) -> Path:
    """A new directory beside `path`, swept once its process is gone."""
    temporary = _temporary(path)
    temporary.mkdir(parents=True)
    return temporary


def remove_directory(path: Path) -> None:
    """Removes a directory, if it is there, all at once: a reader sees all of it or none."""
    retired = _temporary(path)
    try:
        os.rename(path, retired)
    except FileNotFoundError:
        return
    shutil.rmtree(retired, ignore_errors=True)


def sweep_temporaries(directory: Path) -> list[Path]:
    """Remove, anywhere under `directory` and as its siblings, temporaries whose process is gone; returns them."""
    siblings = directory.parent.glob(f".{directory.name}.tmp-*")
    leftovers = [path for path in (*siblings, *directory.rglob(".*.tmp-*")) if _is_abandoned(path)]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


def read_json(path: Path) -> Any:
    """A JSON file. ArtifactError names the file if it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. ArtifactError as for `read_json`, and if it holds something else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} does not hold a JSON object")
    return value


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_disk(path: Path, needed_bytes: float, setting: str, *, what: str = "this run") -> None:
    """SettingError if the disk under `path` (which need not exist yet) has less than `needed_bytes` free."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise SettingError(
            f"{what} needs about {needed_bytes / 1e9:.1f} GB in {path} but {free / 1e9:.1f} GB is free "
            f"(setting {setting})"
        )


def versions() -> dict[str, str]:
    """Versions of Python, tierspec and the packages that shape results; packages not installed are left out."""
    found = {"python": platform.python_version(), "tierspec": tierspec.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of the checkout this package runs from, with `-dirty` if files differ; None outside a checkout."""
    root = Path(tierspec.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _is_abandoned(path: Path) -> bool:
    match = _TEMPORARY.match(path.name)
    if match is None:
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
