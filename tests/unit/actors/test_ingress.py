"""The routes over cells that follow a script."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI

from actors.cell_protocol import Admitted, Block, CellDescription, CellEvent, CellRequest, Failed, Finished, TierStatus
from actors.ingress import build_app, key_digest
from actors.metrics import CellMetrics
from actors.openai_errors import ApiError, overloaded
from tierspec.config import Settings
from tierspec.decoding import DecodingStats

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def finished(reason: str = "stop") -> Finished:
    stats = DecodingStats()
    stats.record_round("suffix", drafted=3, accepted=1, tokens=2, cut=False, exceptions=[(0, 0.5)])
    return Finished(reason, prompt_tokens=5, completion_tokens=2, stats=stats, budget_left=4.5)


def usual(request: CellRequest) -> list[CellEvent]:
    return [Admitted(5), Block((1,), "Hel"), Block((2,), ""), Block((3,), f"lo {request.sampling.stream}"), finished()]


class ScriptedCells:
    """Plays a script for every request and counts what is open. A number in the script is a pause in seconds."""

    def __init__(self, script: Callable[[CellRequest], list[CellEvent | float]] = usual) -> None:
        self.script = script
        self.open = 0
        self.requests: list[CellRequest] = []
        self.tiers = {"verifier": TierStatus(True, 1, 2)}

    async def generate(self, request: CellRequest) -> AsyncIterator[CellEvent]:
        self.requests.append(request)
        self.open += 1
        try:
            for event in self.script(request):
                if isinstance(event, float):
                    await asyncio.sleep(event)
                else:
                    yield event
        finally:
            self.open -= 1

    async def describe(self) -> CellDescription:
        return CellDescription(2048, 1, None, "colocated", self.tiers)

    async def metrics(self) -> list[list]:
        snapshots = []
        for _ in range(2):
            cell = CellMetrics()
            cell.drafts.inc(2)
            cell.accepted_per_position.labels("0").inc()
            snapshots.append(cell.snapshot())
        return snapshots


def app_of(cells: ScriptedCells, key: str | None = None, timeout_s: float = 5.0) -> FastAPI:
    settings = Settings().override(
        f"serve.request_timeout_s={timeout_s}", "serve.max_body_kb=2", "serve.max_queue=2", "decoding.max_running=4"
    )
    return build_app(cells, "m", settings, digest=key_digest(key) if key else None)


def send(app: FastAPI, method: str, path: str, body: object = None, **headers: str | bytes) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tierspec") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(go())


def chunks(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_whole_chat_answer() -> None:
    body = send(app_of(ScriptedCells()), "POST", "/v1/chat/completions", CHAT | {"seed": 9}).json()
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello 0", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2},
    }
    assert body["tierspec"] == {
        "seed": 9,
        "policy": "strict",
        "reproducible": True,
        "draft_source": "auto",
        "tokens_by_source": {"suffix": 1, "target": 1},
        "accept_len": 2.0,
    }


def test_a_lossy_answer_shows_its_limits_and_what_every_choice_spent() -> None:
    lossy = {"temperature": 0, "n": 2, "verification": {"policy": "budgeted", "budget": 5, "gate": 0.5, "cap": 1}}
    account = send(app_of(ScriptedCells()), "POST", "/v1/chat/completions", CHAT | lossy).json()["tierspec"]
    assert account["policy"] == "budgeted"
    assert account["verification"] == {
        "budget": 5.0,
        "budget_per_token": 0.0,
        "gate": 0.5,
        "cap": 1,
        "variant": "paper",
        "relax_stops": False,
        "choices": [{"spent": 0.5, "exceptions": 1, "budget_left": 4.5}] * 2,
    }


def test_two_choices_use_two_noise_streams_and_count_the_prompt_once() -> None:
    cells = ScriptedCells()
    body = send(app_of(cells), "POST", "/v1/completions", {"model": "m", "prompt": "Hi", "n": 2}).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello 0", "Hello 1"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 4)
    assert len({request.sampling.seed for request in cells.requests}) == 1


def test_streamed_chat_answer() -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    response = send(app_of(ScriptedCells()), "POST", "/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    role, first, second, last, usage = chunks(response)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [part["choices"][0]["delta"]["content"] for part in (first, second)] == ["Hel", "lo 0"]
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert usage["tierspec"]["accept_len"] == 2.0
    assert len({part["id"] for part in (role, first, second, last, usage)}) == 1


def test_streamed_completion_has_neither_role_nor_usage_unasked() -> None:
    response = send(app_of(ScriptedCells()), "POST", "/v1/completions", {"model": "m", "prompt": "a", "stream": True})
    parts = chunks(response)
    assert "".join(part["choices"][0]["text"] for part in parts) == "Hello 0"
    assert all("usage" not in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_before_the_first_token_is_a_status(stream: bool) -> None:
    cells = ScriptedCells(lambda request: [Failed(overloaded(3))])
    response = send(app_of(cells), "POST", "/v1/chat/completions", CHAT | {"stream": stream, "n": 2})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "queue_full"
    assert cells.open == 0


def test_failure_after_the_first_byte_is_an_error_event() -> None:
    cells = ScriptedCells(lambda request: [Admitted(1), Block((1,), "a"), Failed(ApiError("broke", status=500))])
    response = send(app_of(cells), "POST", "/v1/chat/completions", CHAT | {"stream": True})
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "broke"


@pytest.mark.parametrize("n", [1, 3])
def test_timeout_frees_every_choice(n: int) -> None:
    cells = ScriptedCells(lambda request: [Admitted(1), 30.0])
    response = send(app_of(cells, timeout_s=0.05), "POST", "/v1/chat/completions", CHAT | {"n": n})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert (len(cells.requests), cells.open) == (n, 0)


def test_cell_that_breaks_is_a_503() -> None:
    def broken(request: CellRequest) -> list[CellEvent | float]:
        raise OSError("gone")

    response = send(app_of(ScriptedCells(broken)), "POST", "/v1/chat/completions", CHAT)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", CHAT | {"model": "other"}, 404, "model_not_found"),
        ("GET", "/v1/models/other", None, 404, "model_not_found"),
        ("GET", "/v1/nothing", None, 404, None),
        ("GET", "/v1/chat/completions", None, 405, None),
        ("POST", "/v1/chat/completions", CHAT | {"tools": [{}]}, 400, "unsupported_parameter"),
        ("POST", "/v1/chat/completions", CHAT | {"n": 7}, 400, "invalid_value"),
        ("POST", "/v1/chat/completions", CHAT | {"stop": [""]}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"model": "m", "prompt": "a" * 2000}, 413, "body_too_large"),
    ],
)
def test_errors_have_openais_body(method: str, path: str, body: object, status: int, code: str | None) -> None:
    response = send(app_of(ScriptedCells()), method, path, body)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["code"] == code


def test_models_health_and_metrics() -> None:
    cells = ScriptedCells()
    app = app_of(cells)
    assert send(app, "GET", "/v1/models").json()["data"][0]["id"] == "m"
    assert send(app, "GET", "/v1/models/m").json()["max_model_len"] == 2048
    assert send(app, "GET", "/health").json()["status"] == "ok"
    cells.tiers = {"verifier": TierStatus(False, 1, 2)}
    assert send(app, "GET", "/health").status_code == 503
    cells.tiers = {"verifier": TierStatus(True, 1, 2), "drafter": TierStatus(False, 3, 1, given_up=True)}
    health = send(app, "GET", "/health")
    assert health.status_code == 200
    assert health.json()["status"] == "the drafter was lost too often and is given up"
    text = send(app, "GET", "/metrics").text
    assert "tierspec_spec_decode_num_drafts_total 4.0" in text
    assert 'tierspec_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2.0' in text


def test_api_key() -> None:
    app = app_of(ScriptedCells(), key="secret")
    assert send(app, "GET", "/v1/models").status_code == 401
    wrong: str | bytes
    for wrong in ("Bearer wrong", "Basic secret", "secret", "Bearer sécret".encode()):
        response = send(app, "POST", "/v1/chat/completions", CHAT, Authorization=wrong)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert send(app, "GET", "/metrics").status_code == 401
    assert send(app, "GET", "/v1/models", Authorization="Bearer secret").status_code == 200
    assert send(app, "GET", "/health").status_code == 200
