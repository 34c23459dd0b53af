"""One Ray session per job: a local Ray of its own, or the cluster named by the settings or by RAY_ADDRESS."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from tierspec.config import Settings
from tierspec.errors import SettingError


@contextmanager
def ray_session(settings: Settings) -> Iterator[None]:
    """Ray for the length of the block; a session that is already there is used and left running.

    `ray job submit` sets RAY_ADDRESS, so a submitted job joins the cluster it was submitted to.
    """
    if ray.is_initialized():
        yield
        return
    _without_losing_sigterm(**session_arguments(settings, os.environ.get("RAY_ADDRESS", "")))
    try:
        yield
    finally:
        ray.shutdown()


def session_arguments(settings: Settings, environment_address: str) -> dict[str, Any]:
    """Arguments of `ray.init`; "local" so that a Ray that happens to run on this host is never joined by accident."""
    common = {"namespace": settings.ray.namespace, "logging_level": "warning"}
    if address := settings.ray.address or environment_address:
        return common | {"address": address}
    local = {
        "address": "local",
        "num_cpus": settings.ray.num_cpus,
        "object_store_memory": settings.ray.object_store_mb * 10**6,
        "include_dashboard": False,
    }
    return common | local | ({"_temp_dir": settings.ray.temp_dir} if settings.ray.temp_dir else {})


def _without_losing_sigterm(**arguments: Any) -> None:
    # ray.init puts its own SIGTERM handler in place of ours; a job must be able to save before it goes.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**arguments)
    except (ConnectionError, ValueError) as error:
        place = (
            f"join the cluster at {arguments['address']}" if arguments["address"] != "local" else "start a local Ray"
        )
        raise SettingError(f"ray.address: cannot {place}: {str(error).splitlines()[0]}") from error
    if in_main_thread:
        signal.signal(signal.SIGTERM, handler)
