"""The endpoint as a whole: the Serve application built from settings, its start and its end.

Ray itself is the caller's (a job's session or a test's); Serve is started and stopped here.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from actors.cell import Cell
from actors.ingress import Ingress, key_digest
from actors.placement import place_cell
from tierspec.artifacts import run_directory
from tierspec.config import Settings
from tierspec.drafters.families import inspect_drafter
from tierspec.drafters.payoff import CONFIG_FILE
from tierspec.drafters.routing import LEARNED
from tierspec.errors import ArtifactError, SettingError
from tierspec.models.loading import resolve_source
from tierspec.paths import user_path

APPLICATION = "tierspec"
HEALTH_POLL_S = 0.2
DRAIN_POLL_S = 0.2
HEALTH_TIMEOUT_S = 15.0
LAST_WORDS_S = 5.0
"""The ingress outlives the cells' drain by this, to pass on how they ended what was still running."""

SPARE_REQUESTS = 16
"""A cell refuses generations over its capacity itself, with 429; what Serve lets in beyond is health and metrics."""


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint. `url` has no trailing slash; OpenAI clients take `url + "/v1"`."""

    url: str
    model: str
    drafter: Path | None


def drafter_directory(settings: Settings) -> Path | None:
    """Where the neural drafter is: `serve.drafter`, or the run's own if there is one; None: serve without.

    Raises ArtifactError for a named folder that does not exist.
    """
    named = settings.serve.drafter
    if not named:
        return None
    path = run_directory(settings, "drafter") if named == "auto" else user_path(named, "serve.drafter")
    if (path / "config.json").is_file():
        return path.resolve()
    if named == "auto":
        return None
    raise ArtifactError(f"serve.drafter: {path} holds no drafter (no config.json)")


def payoff_directory(settings: Settings) -> Path | None:
    """Where the payoff predictor of a learned router is: `serve.payoff`, or the run's own; None: no router asks it.

    Raises SettingError where one is asked for that does not exist.
    """
    draft, named = settings.draft, settings.serve.payoff
    if draft.source != "auto" or draft.router not in LEARNED:
        return None
    path = run_directory(settings, "payoff") if named == "auto" else user_path(named or "", "serve.payoff")
    if named and (path / CONFIG_FILE).is_file():
        return path.resolve()
    raise SettingError(
        f"draft.router: '{draft.router}' needs a payoff predictor, and {path if named else 'serve.payoff'} holds none: "
        "run jobs.payoff first"
    )


def check_endpoint(settings: Settings) -> None:
    """Everything that can be found wrong before anything is started. Fetches the target if it is not there yet.

    Raises SettingError: an open address without an API key, a key that is not set, an address that is not this
    machine's, a port that is taken, a target or drafter that is missing, more CPUs asked for than a local Ray has.
    """
    if _api_key(settings) is None and not _is_loopback(settings.serve.host):
        raise SettingError(
            f"serve.host: {settings.serve.host} can be reached from other machines, so an API key is needed: "
            "name the variable that holds it in serve.api_key_env"
        )
    _check_port(settings.serve.host, settings.serve.port)
    _check_cpus(settings)
    drafter = drafter_directory(settings)
    payoff_directory(settings)
    resolve_source(settings.target.source)
    if drafter is not None:
        inspect_drafter(drafter)


def build_application(settings: Settings) -> Application:
    """Ingress over cells. The API key is read from this process's environment; only its digest is passed on."""
    drafter = drafter_directory(settings)
    placement = place_cell(settings, has_drafter=drafter is not None)
    capacity = settings.decoding.max_running + settings.serve.max_queue
    bundles: dict[str, Any] = {"placement_group_bundles": placement.bundles, "placement_group_strategy": "PACK"}
    cell = _deployment(Cell).options(
        name="cell",
        num_replicas=settings.serve.replicas,
        ray_actor_options={
            "num_cpus": placement.cell["CPU"],
            "num_gpus": placement.cell.get("GPU", 0),
            "resources": {name: n for name, n in placement.cell.items() if name not in ("CPU", "GPU")},
        },
        max_ongoing_requests=capacity + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.serve.drain_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_timeout_s=settings.serve.tier_timeout_s,
        max_constructor_retry_count=1,
        **(bundles if placement.bundles else {}),
    )
    ingress = _deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": settings.serve.ingress_cpus},
        max_ongoing_requests=2 * settings.serve.replicas * capacity + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.serve.drain_s + LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
    )
    key = _api_key(settings)
    payoff = payoff_directory(settings)
    paths = [None if path is None else str(path) for path in (drafter, payoff)]
    cells = cell.bind(_found_anywhere(settings), paths[0], placement, paths[1])
    return ingress.bind(cells, settings, None if key is None else key_digest(key))


@contextmanager
def endpoint(settings: Settings) -> Iterator[Endpoint]:
    """The endpoint for the length of the block. Ray must be up, and `check_endpoint` has passed.

    At the end running requests get `serve.drain_s` to finish.
    Raises SettingError where target or drafter cannot be served, RuntimeError where Serve fails otherwise.
    """
    if serve.status().proxies:
        raise SettingError("ray.address: this cluster already runs Ray Serve; stop that first (serve shutdown)")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http = HTTPOptions(host=settings.serve.host, port=settings.serve.port)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=http, logging_config=quiet)
    try:
        try:
            serve.run(build_application(settings), name=APPLICATION, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:
            raise _named(error) from error
        url = _url(settings.serve.host, settings.serve.port)
        _wait_until_healthy(url, settings.serve.start_timeout_s)
        yield Endpoint(url, settings.target.source, drafter_directory(settings))
    finally:
        serve.delete(APPLICATION)
        if not _is_local(settings):
            serve.shutdown()  # a local Ray takes Serve with it, without the error that this call makes it print


def _found_anywhere(settings: Settings) -> Settings:
    """Settings whose target, if a local directory, is found from any process's working directory."""
    path = user_path(settings.target.source, "target.source")
    if not path.is_dir():
        return settings
    target = settings.target.model_copy(update={"source": str(path.resolve())})
    return settings.model_copy(update={"target": target})


def _deployment(kind: type) -> Deployment:
    made: Any = serve.deployment(kind)
    return made


def _api_key(settings: Settings) -> str | None:
    variable = settings.serve.api_key_env
    if not variable:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise SettingError(f"serve.api_key_env: the environment variable {variable} is not set")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(host: str, port: int) -> None:
    # Serve's proxy binds with SO_REUSEPORT and would share a port that another endpoint already has
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingError(f"serve.host: {host} is not an address: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingError(
                    f"serve.port: {port} on {host} is taken; choose another or stop what uses it"
                ) from error
            raise SettingError(f"serve.host: cannot listen on {host} port {port}: {error.strerror}") from error


def _check_cpus(settings: Settings) -> None:
    if not _is_local(settings):
        return
    placement = place_cell(settings, has_drafter=drafter_directory(settings) is not None)
    needed = settings.serve.ingress_cpus + settings.serve.replicas * sum(
        bundle["CPU"] for bundle in placement.bundles or [placement.cell]
    )
    if needed > settings.ray.num_cpus:
        raise SettingError(
            f"serve.replicas: the cells and the ingress set aside {needed:g} CPUs, but a local Ray has "
            f"ray.num_cpus = {settings.ray.num_cpus}: lower the first or raise the second"
        )


def _is_local(settings: Settings) -> bool:
    """Whether Ray is one that the job starts for itself and takes down again."""
    return not (settings.ray.address or os.environ.get("RAY_ADDRESS"))


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _wait_until_healthy(url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    problem = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_TIMEOUT_S):
                return
        except OSError as error:
            problem = str(error)
        time.sleep(HEALTH_POLL_S)
    raise RuntimeError(f"the endpoint at {url} is not healthy after {timeout_s:g} s: {problem}")


def _named(error: RuntimeError) -> Exception:
    """What a cell's constructor found wrong; Serve keeps it only as the text of a traceback."""
    applications = serve.status().applications.values()
    texts = [str(error), *(cell.message for application in applications for cell in application.deployments.values())]
    found = re.findall(rf"{SettingError.__module__}\.(?:SettingError|ArtifactError): (.+)", "\n".join(texts))
    return SettingError(found[-1].strip()) if found else error
