"""What every reported number must be read with: the machine, the versions, the commit."""

import platform
import time
from pathlib import Path
from typing import Any

import torch

from tierspec.artifacts import git_revision, versions

_PACKAGES = ("torch", "transformers", "ray", "deepspeed")


def describe_environment() -> dict[str, Any]:
    """Machine, threads of torch in this process, versions, git revision, and the time in UTC."""
    found = versions()
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: found[name] for name in _PACKAGES if name in found},
        "git": git_revision(),
        "created": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def machine() -> str:
    """The processor, or the GPU where there is one, as it names itself."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
