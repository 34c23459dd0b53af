"""What a training process needs before DeepSpeed is imported."""

import hashlib
import importlib.metadata
import logging
import os
import sys
from pathlib import Path

from pipelines.training.build_locks import release_left_locks
from tierspec.config import Settings
from tierspec.paths import cache_directory
from tierspec.threads import use_threads


def prepare_process(settings: Settings) -> int:
    """Set this worker's threads and what DeepSpeed reads from the environment; returns the number of threads.

    DeepSpeed compiles a small kernel on first use on CPU; it is kept in the user's cache, and `ninja` is found beside
    the interpreter even if its environment is not activated.
    """
    threads = use_threads(settings.training.threads, processes=settings.training.workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not settings.target.device.startswith("cuda"):
        os.environ["DS_ACCELERATOR"] = "cpu"
    release_left_locks(_keep_kernels())
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return threads


def build_cpu_kernel() -> None:
    """Compile that kernel now, at set-up, and not in the middle of the first run."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    release_left_locks(_keep_kernels())
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def _keep_kernels() -> Path:
    """Folder of the kernels."""
    # kernels are built against the headers of one environment, and built anew whenever another one comes along
    key = hashlib.sha256(f"{sys.prefix} {importlib.metadata.version('torch')}".encode()).hexdigest()[:12]
    folder = os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_directory() / "torch_extensions" / key))
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return Path(folder)
