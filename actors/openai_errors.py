"""Errors of the HTTP endpoint, in the shape of OpenAI's API."""

from __future__ import annotations

from tierspec.errors import SettingError

RETRY_AFTER_S = 1


class ApiError(SettingError):
    """An answer that is not 200: its HTTP status and the four fields of OpenAI's error body.

    `param` names the request field at fault; `code` is a stable word that programs can test.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.message, self.status, self.kind, self.param, self.code)

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.status == 429:
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def _rebuild(message: str, status: int, kind: str, param: str | None, code: str | None) -> ApiError:
    return ApiError(message, status=status, kind=kind, param=param, code=code)


def overloaded(capacity: int) -> ApiError:
    """Every slot and every place in the queue is taken."""
    message = f"all {capacity} places of this endpoint are taken; try again in {RETRY_AFTER_S} s"
    return ApiError(message, status=429, kind="rate_limit_error", code="queue_full")


def too_many_choices(asked: int, capacity: int) -> ApiError:
    """More answers in one request than the endpoint ever has places for."""
    message = f"{asked} answers are asked for, prompts times n, but this endpoint has {capacity} places"
    return ApiError(message, param="n", code="invalid_value")


def body_too_large(limit_kb: int) -> ApiError:
    message = f"the body is larger than {limit_kb} kB, the limit of this endpoint (serve.max_body_kb)"
    return ApiError(message, status=413, code="body_too_large")


def model_not_found(name: str, served: str) -> ApiError:
    message = f"model {name!r} does not exist; this endpoint serves {served!r}"
    return ApiError(message, status=404, param="model", code="model_not_found")


def unauthorized() -> ApiError:
    return ApiError("missing or wrong API key", status=401, code="invalid_api_key")


def took_too_long(timeout_s: float) -> ApiError:
    message = f"the request took longer than {timeout_s:g} s"
    return ApiError(message, status=504, kind="server_error", code="timeout")


def server_error(message: str, *, status: int = 500) -> ApiError:
    return ApiError(message, status=status, kind="server_error", code="internal_error")
