"""C++ sources compiled once per machine with the system's compiler, loaded through ctypes."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tierspec.paths import cache_directory


class CompilationFailed(RuntimeError):
    """There is no working C++ compiler; the message says what it lacks."""


def compiled_library(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The shared object of `source`, cached by source, flags, compiler and processor.

    Raises:
        CompilationFailed: no compiler, or it does not compile this.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise CompilationFailed("no C++ compiler found")
    command = [compiler, "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", *flags, str(source)]
    try:
        return ctypes.CDLL(str(_compiled(source, command)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise CompilationFailed(f"{source.name} could not be built ({reason[:1]})") from error


def _compiled(source: Path, command: list[str]) -> Path:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    parts = (source.read_text(), " ".join(command[1:-1]), version, platform.processor(), _cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_directory() / "kernels" / f"{source.stem}-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=True, timeout=300)
            built.replace(target)
    return target


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
