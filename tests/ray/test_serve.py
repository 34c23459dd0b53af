"""The endpoint on real Ray, Serve and HTTP: both placements, lost tiers, clients that leave, bad requests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from ray import serve

from actors.application import check_endpoint, endpoint
from pipelines.cluster import ray_session
from tests.support.target_drafters import write_untrained_drafter
from tierspec.config import Settings, load_settings
from tierspec.decoding import DraftOptions, Generation, SamplingParams, generate
from tierspec.drafters import load_drafter
from tierspec.errors import SettingError
from tierspec.models.target import Target
from tierspec.verification import VerificationPolicy

ROOT = Path(__file__).parents[2]
MODEL = "embedded:tiny"
PROMPTS = ["What is the capital of France?", "def add(left, right):", "Once upon a time there was a miller"]
RUNNING, QUEUED = 6, 2
LONG = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Settings:
    drafter = write_untrained_drafter(tmp_path_factory.mktemp("run") / "drafter", tiny_target, draft_vocab_size=256)
    return load_settings(
        ROOT / "configs" / "tiny.yaml",
        [
            f"serve.drafter={drafter}",
            f"serve.max_queue={QUEUED}",
            f"decoding.max_running={RUNNING}",
            "serve.verifier_threads=1",
            "serve.drafter_threads=1",
            "serve.drain_s=5",
        ],
    )


@pytest.fixture(scope="module")
def ray_cluster(settings: Settings) -> Iterator[None]:
    with ray_session(settings):
        yield


@pytest.fixture(scope="module", params=["colocated", "separate"])
def url(request: pytest.FixtureRequest, settings: Settings, ray_cluster: None) -> Iterator[str]:
    placed = settings.override(f"serve.placement={request.param}", f"serve.port={free_port()}")
    check_endpoint(placed)
    with endpoint(placed) as running:
        yield running.url
    serve.shutdown()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def health(url: str) -> dict:
    return httpx.get(f"{url}/health", timeout=20).json()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def wait_until(holds, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def expected(target: Target, prompt: str, **sampling: object) -> Generation:
    ids = target.encode_chat([{"role": "user", "content": prompt}])
    return generate(target, [ids], sampling=SamplingParams(**sampling))[0]  # type: ignore[arg-type]


def chat(client: openai.OpenAI, prompt: str, source: str, stream: bool, **fields: object) -> tuple[str, object]:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        stream=stream,
        extra_body={"draft": {"source": source}},
        **({"stream_options": {"include_usage": True}} if stream else {}),
        **fields,
    )
    if not stream:
        return answer.choices[0].message.content, answer
    chunks = list(answer)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks[-1]


def test_text_is_that_of_the_library(client: openai.OpenAI, tiny_target: Target) -> None:
    """Whatever drafts, streamed or not, greedy or sampled, alone or beside others."""
    cases = [
        (prompt, source, stream, temperature)
        for index, prompt in enumerate(PROMPTS)
        for source in ("auto", "neural", "suffix", "none")
        for stream, temperature in ((bool(index % 2), 0.0), (not index % 2, 0.9))
    ]

    def check(case: tuple[str, str, bool, float]) -> None:
        prompt, source, stream, temperature = case
        text, last = chat(client, prompt, source, stream, temperature=temperature, seed=11, top_p=0.9, max_tokens=48)
        want = expected(tiny_target, prompt, temperature=temperature, seed=11, top_p=0.9, max_new_tokens=48)
        assert (text, last.usage.completion_tokens) == (want.text, len(want.token_ids)), case
        details = last.usage.completion_tokens_details
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert drafted > 0 if source in ("auto", "neural") else source == "suffix" or drafted == 0
        assert sum(last.tierspec["tokens_by_source"].values()) == len(want.token_ids)

    with ThreadPoolExecutor(RUNNING) as pool:
        list(pool.map(check, cases))


def test_budgeted_answers_are_those_of_the_library_beside_others(
    client: openai.OpenAI, settings: Settings, tiny_target: Target
) -> None:
    """Source and length of the drafts are pinned; strict and sampled requests share the batch."""
    draft = replace(DraftOptions.from_settings(settings.draft), source="neural")
    policy = VerificationPolicy("budgeted", budget=20.0, gate=4.0)
    asked = {"policy": "budgeted", "budget": 20.0, "gate": 4.0}

    def answer(case: tuple[str, str]) -> tuple[str, dict]:
        prompt, kind = case
        found = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=48,
            temperature=0.9 if kind == "sampled" else 0.0,
            seed=4,
            extra_body={
                "draft": {"source": "neural"},
                "verification": asked if kind == "budgeted" else {"policy": "strict"},
            },
        )
        return found.choices[0].message.content, found.tierspec

    cases = [(prompt, kind) for prompt in PROMPTS for kind in ("budgeted", "sampled", "strict")]
    with ThreadPoolExecutor(RUNNING) as pool:
        answers = dict(zip(cases, pool.map(answer, cases), strict=True))
    drafter = load_drafter(Path(settings.serve.drafter or ""), tiny_target)
    exceptions = 0
    for prompt in PROMPTS:
        ids = tiny_target.encode_chat([{"role": "user", "content": prompt}])
        sampling = SamplingParams(max_new_tokens=48)
        (want,) = generate(tiny_target, [ids], drafter=drafter, policy=policy, sampling=sampling, draft=draft)
        text, account = answers[prompt, "budgeted"]
        assert text == want.text and account["reproducible"]
        (ledger,) = account["verification"]["choices"]
        assert ledger["spent"] == pytest.approx(want.stats.deviation)
        assert ledger["budget_left"] == pytest.approx(20.0 - want.stats.deviation)
        exceptions += ledger["exceptions"]
        assert answers[prompt, "strict"][0] == expected(tiny_target, prompt, max_new_tokens=48).text
        sampled = expected(tiny_target, prompt, max_new_tokens=48, temperature=0.9, seed=4).text
        assert answers[prompt, "sampled"][0] == sampled
    assert exceptions > 0


def test_choices_and_plain_completions(client: openai.OpenAI, tiny_target: Target) -> None:
    ids = tiny_target.tokenizer(PROMPTS[1])["input_ids"]
    sampled = client.completions.create(model=MODEL, prompt=[PROMPTS[1]], n=2, seed=3, max_tokens=20)
    for stream, choice in enumerate(sampled.choices):
        want = generate(
            tiny_target, [ids], sampling=SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, stream=stream)
        )[0]
        assert (choice.text, choice.finish_reason) == (want.text, want.finish_reason)
    assert sampled.choices[0].text != sampled.choices[1].text
    by_ids = client.completions.create(model=MODEL, prompt=ids, seed=3)
    assert (by_ids.choices[0].text, by_ids.usage.prompt_tokens) == (
        sampled.choices[0].text[: len(by_ids.choices[0].text)],
        len(ids),
    )
    assert by_ids.usage.completion_tokens <= 16


def test_seed_that_was_drawn_repeats_the_answer(client: openai.OpenAI) -> None:
    text, answer = chat(client, PROMPTS[0], "auto", False, max_tokens=16)
    again, _ = chat(client, PROMPTS[0], "none", False, max_tokens=16, seed=answer.tierspec["seed"])
    assert text == again


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"verification": {"policy": "budgeted"}}}, "verification.policy"),
        ({"temperature": 0, "extra_body": {"verification": {"policy": "budgeted", "cap": -1}}}, "verification.cap"),
    ],
)
def test_bad_request(client: openai.OpenAI, fields: dict, param: str) -> None:
    usual: dict = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(usual | fields))
    assert (caught.value.body["param"], caught.value.body["type"]) == (param, "invalid_request_error")  # type: ignore[index]


def test_clients_that_leave_free_their_places(url: str, client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": LONG, "ignore_eos": True}

    def leave(index: int) -> None:
        stream = index % 2 == 0
        patience = 60 if stream else 0.3
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": stream}, timeout=patience) as got,
        ):
            next(got.iter_lines())

    with ThreadPoolExecutor(RUNNING) as pool:
        list(pool.map(leave, range(20)))
    wait_until(lambda: metric(url, "tierspec_num_requests_running") == 0)
    assert metric(url, "tierspec_num_requests_waiting") == 0
    with ThreadPoolExecutor(RUNNING) as pool:
        texts = list(pool.map(lambda _: chat(client, "Hi", "auto", False, max_tokens=8)[0], range(RUNNING)))
    assert len(texts) == RUNNING


def test_more_than_the_queue_holds_is_refused(url: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "ignore_eos": True}
    start = threading.Barrier(3 * (RUNNING + QUEUED))

    def ask(_: int) -> httpx.Response:
        start.wait()
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    with ThreadPoolExecutor(start.parties) as pool:
        answers = list(pool.map(ask, range(start.parties)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= RUNNING + QUEUED
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert (refused.headers["retry-after"], refused.json()["error"]["code"]) == ("1", "queue_full")


def test_metrics_count_what_was_done(url: str, client: openai.OpenAI) -> None:
    drafts = metric(url, "tierspec_spec_decode_num_drafts_total")
    tokens = metric(url, "tierspec_generation_tokens_total")
    _, answer = chat(client, PROMPTS[0], "neural", False, temperature=0, max_tokens=24)
    assert metric(url, "tierspec_generation_tokens_total") - tokens == answer.usage.completion_tokens
    assert metric(url, "tierspec_spec_decode_num_drafts_total") > drafts
    for name in (
        "tierspec_spec_decode_num_draft_tokens_total",
        "tierspec_tier_seconds_count",
        "tierspec_tier_tokens_total",
        "tierspec_channel_seconds_count",
        "tierspec_draft_source_rounds_total",
        "tierspec_time_to_first_token_seconds_count",
        "tierspec_inter_token_latency_seconds_count",
        "tierspec_prompt_tokens_total",
    ):
        assert metric(url, name) > 0, name


@pytest.mark.parametrize("url", ["separate"], indirect=True)
@pytest.mark.parametrize("tier", ["drafter", "verifier"])
def test_lost_tier_changes_no_text(url: str, client: openai.OpenAI, tiny_target: Target, tier: str) -> None:
    before = health(url)
    pid = before["tiers"][tier]["pid"]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPTS[0]}],
        temperature=0,
        max_tokens=LONG,
        stream=True,
        extra_body={"draft": {"source": "neural"}, "ignore_eos": True},
    )
    text = ""
    for chunk in answer:
        text += chunk.choices[0].delta.content or ""
        if pid and text:
            os.kill(pid, signal.SIGKILL)
            pid = 0
    assert text == expected(tiny_target, PROMPTS[0], max_new_tokens=LONG, ignore_eos=True).text
    wait_until(lambda: health(url)["tiers"][tier] != before["tiers"][tier] and health(url)["tiers"][tier]["ready"])
    assert metric(url, "tierspec_tier_restarts_total") >= 1
    _, last = chat(client, PROMPTS[1], "neural", False, temperature=0, max_tokens=16)
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_port_that_is_taken(url: str, settings: Settings) -> None:
    port = url.rpartition(":")[2]
    with pytest.raises(SettingError, match=rf"^serve.port: {port} "):
        check_endpoint(settings.override(f"serve.port={port}"))
