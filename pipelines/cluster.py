"""The Ray that a pipeline runs on: joined if one is named, else started here and taken down again."""

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from tierspec.config import Settings
from tierspec.errors import SettingError
from tierspec.paths import user_path

_GRACE_S = 5.0
_FOLDER = re.compile(r"^tsr-([0-9a-f]+)-[0-9a-f]{4}$")
_LONGEST_FOLDER = 27  # Ray puts sockets up to 80 characters below it, and a socket's path ends at 107


@contextlib.contextmanager
def ray_session(settings: Settings) -> Iterator[None]:
    """Ray for the block. Nested uses share the outermost one.

    `ray.address`, or RAY_ADDRESS as `ray job submit` sets it, names a cluster to join; otherwise a local Ray with
    `ray.num_cpus` logical CPUs starts in a folder of its own and leaves neither process nor file behind.

    Raises:
        SettingError: the named cluster cannot be joined, or the local one does not start.
    """
    if ray.is_initialized():
        yield
        return
    with _joined(settings) if named_address(settings) else _local(settings):
        yield


def named_address(settings: Settings) -> str:
    """Address of the cluster to join; "" for a local Ray."""
    return settings.ray.address or os.environ.get("RAY_ADDRESS", "")


def worker_gpus(settings: Settings, field: str, workers: int, cluster_gpus: float) -> float:
    """GPUs that each of a stage's `workers`, set by `field`, reserves: one on CUDA, else none.

    Raises:
        SettingError: a local Ray, which cannot grow, has fewer: the workers would wait for ever.
    """
    if not settings.target.device.startswith("cuda"):
        return 0.0
    if workers > cluster_gpus and not named_address(settings):
        raise SettingError(f"{field}: {workers} workers need a GPU each, and this machine has {cluster_gpus:g}")
    return 1.0


@contextlib.contextmanager
def _joined(settings: Settings) -> Iterator[None]:
    address = named_address(settings)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself ends the whole process, a minute later, if nobody answers there
            socket.create_connection((host.strip("[]"), int(port)), timeout=_GRACE_S).close()
        _init(settings, address=address)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise SettingError(f"ray.address: cannot join {address} ({_first_line(error)})") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _local(settings: Settings) -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")  # a niced worker on all cores waits for its slower thread
    parent = user_path(settings.ray.temp_dir or "/tmp", "ray.temp_dir").absolute()
    if len(str(parent)) > _LONGEST_FOLDER:
        raise SettingError(
            f"ray.temp_dir: {parent} is too long a path for Ray's sockets; use at most {_LONGEST_FOLDER} characters"
        )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        folder = str(parent / f"tsr-{os.getpid():x}-{secrets.token_hex(2)}")
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise SettingError(f"ray.temp_dir: cannot write to {parent} ({error.strerror})") from error
    try:
        try:
            _init(
                settings,
                address="local",  # or Ray would join whichever was started last on this host
                num_cpus=settings.ray.num_cpus,
                object_store_memory=settings.ray.object_store_mb * 10**6,
                include_dashboard=False,
                _temp_dir=folder,
            )
        except Exception as error:  # on an overloaded machine Ray raises it bare
            raise SettingError(f"ray: the local Ray did not start ({_first_line(error)})") from error
        yield
    finally:
        family = _descendants(folder)
        ray.shutdown()
        _reap(family)
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the folders of local Rays whose driver was killed."""
    for folder in parent.glob("tsr-*"):
        match = _FOLDER.match(folder.name)
        with contextlib.suppress(FileNotFoundError):  # another one that starts now sweeps too
            if match and not psutil.pid_exists(int(match[1], 16)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _init(settings: Settings, **arguments: Any) -> None:
    """`ray.init`, which would put its own SIGTERM handler in place of the job's."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(namespace=settings.ray.namespace, log_to_driver=False, logging_level=logging.WARNING, **arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _descendants(folder: str) -> list[psutil.Process]:
    """Processes of the local Ray. Its agents outlive `ray.shutdown()`, so they are noted while they have parents."""

    def is_ours(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            return line.startswith("ray::") or folder in line
        return False

    return [process for process in psutil.Process().children(recursive=True) if is_ours(process)]


def _reap(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with contextlib.suppress(psutil.Error):
                stop(process)
        _, alive = psutil.wait_procs(alive, timeout=_GRACE_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
