"""The HTTP endpoint: OpenAI's routes over cells.

`build_app` makes the FastAPI application around any `Cells`; the Serve deployment that gives it real ones is last.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client.metrics_core import Metric
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.answers import all_admitted, merged, streamed_answer, whole_answer
from actors.cell_protocol import CellDescription, CellEvent, CellRequest, Cells
from actors.metrics import CONTENT_TYPE, render
from actors.openai_errors import (
    ApiError,
    body_too_large,
    model_not_found,
    server_error,
    too_many_choices,
    unauthorized,
)
from actors.openai_protocol import ChatBody, CompletionBody, GenerationBody, RequestDefaults, parse
from actors.openai_responses import Reply, model_card
from tierspec.config import Settings

logger = logging.getLogger("tierspec.ingress")

OPEN_PATHS = frozenset({"/health"})
CELL_ANSWER_S = 10.0


def key_digest(key: str) -> bytes:
    """What the endpoint keeps of its API key."""
    return hashlib.sha256(key.encode()).digest()


class RequireKey:
    """ASGI middleware: every path but /health needs `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, digest: bytes) -> None:
        self._app = app
        self._digest = digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
        else:
            await _error(unauthorized())(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        presented = hashlib.sha256(key.strip()).digest()
        return hmac.compare_digest(presented, self._digest) and scheme.lower() == b"bearer"


def build_app(cells: Cells, model: str, settings: Settings, *, digest: bytes | None) -> FastAPI:
    """The endpoint for `model`. `digest` is `key_digest` of the API key; None asks for no key.

    `settings`: for the limits of a request, and for what those get that do not ask.
    """
    serve = settings.serve
    places = serve.replicas * (settings.decoding.max_running + serve.max_queue)
    defaults = RequestDefaults.from_settings(settings)
    app = FastAPI(title="tierspec", docs_url=None, redoc_url=None, openapi_url=None)
    if digest is not None:
        app.add_middleware(RequireKey, digest=digest)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        return _error(ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        logger.exception("%s failed", request.url.path, exc_info=error)
        return _error(server_error("internal error; the log of the endpoint has the details"))

    async def answer(kind: type[GenerationBody], request: Request) -> Response:
        generation = parse(kind, await _body(request, serve.max_body_kb), defaults)
        if generation.model != model:
            raise model_not_found(generation.model, model)
        if generation.num_choices > places:
            raise too_many_choices(generation.num_choices, places)
        requests = [CellRequest.of(generation, index) for index in range(generation.num_choices)]
        events = merged([cells.generate(request) for request in requests], serve.request_timeout_s)
        if not generation.stream:
            async with aclosing(events):
                return JSONResponse(await whole_answer(Reply(generation), events))
        opened = await all_admitted(events, generation.num_choices)
        return StreamingResponse(
            streamed_answer(Reply(generation), opened, events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def card() -> dict[str, object]:
        cell = await cells.describe()
        return model_card(model, cell.created, cell.max_context)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(ChatBody, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(CompletionBody, request)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [await card()]}

    @app.get("/v1/models/{name:path}")
    async def model_by_name(name: str) -> dict[str, object]:
        if name != model:
            raise model_not_found(name, model)
        return await card()

    @app.get("/health")
    async def health() -> Response:
        try:
            cell = await asyncio.wait_for(cells.describe(), CELL_ANSWER_S)
        except Exception as error:
            logger.warning("no cell answers: %r", error)
            return JSONResponse({"status": "no cell answers"}, 503)
        ready = cell.tiers["verifier"].ready
        lost = [name for name, tier in cell.tiers.items() if tier.given_up]
        starting = [name for name, tier in cell.tiers.items() if not tier.ready and not tier.given_up]
        notes = [f"the {name} was lost too often and is given up" for name in lost]
        notes += [f"the {name} is starting" for name in starting]
        body = {
            "status": "; ".join(notes) or "ok",
            "model": model,
            "drafter": cell.drafter,
            "placement": cell.placement,
            "tiers": {name: asdict(tier) for name, tier in cell.tiers.items()},
        }
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(render(await cells.metrics()), media_type=CONTENT_TYPE)

    return app


async def _body(request: Request, limit_kb: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    limit, parts, size = 1000 * limit_kb, [], 0
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise body_too_large(limit_kb)
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise body_too_large(limit_kb)
    return b"".join(parts)


def _error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers())


class ServeCells:
    """The cells behind a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def generate(self, request: CellRequest) -> AsyncIterator[CellEvent]:
        response: Any = self._handle.options(stream=True).generate.remote(request)
        try:
            async for event in response:
                yield event
        finally:
            response.cancel()

    async def describe(self) -> CellDescription:
        return await self._handle.describe.remote()

    async def metrics(self) -> list[list[Metric]]:
        return await self._handle.broadcast("metrics").results_async()


class Ingress:
    """The Serve deployment of `build_app`."""

    def __init__(self, cells: DeploymentHandle, settings: Settings, digest: bytes | None) -> None:
        self._app = build_app(ServeCells(cells), settings.target.source, settings, digest=digest)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app
