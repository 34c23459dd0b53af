"""Requests: what is refused names its field; what passes means what it says."""

import json

import pytest

from actors.openai_errors import ApiError
from actors.openai_protocol import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    GenerationBody,
    GenerationRequest,
    RequestDefaults,
    parse,
)
from tierspec.config import Settings
from tierspec.verification import STRICT, VerificationPolicy

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: object) -> GenerationRequest:
    return parse(ChatBody, json.dumps({"model": "m", "messages": USER} | fields).encode())


def completion(**fields: object) -> GenerationRequest:
    return parse(CompletionBody, json.dumps({"model": "m", "prompt": "Hi"} | fields).encode())


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatBody, b"", None),
        (ChatBody, b"{", None),
        (ChatBody, b"[]", None),
        (ChatBody, b'{"model": "m", "messages": [], "temperature": NaN}', None),
        (ChatBody, b"[" * 100_000, None),
        (ChatBody, b'{"messages": [{"role": "user", "content": "Hi"}]}', "model"),
        (ChatBody, b'{"model": "m"}', "messages"),
        (ChatBody, b'{"model": "m", "messages": []}', "messages"),
        (ChatBody, b'{"model": "m", "messages": "Hi"}', "messages"),
        (ChatBody, b'{"model": "m", "messages": ["Hi"]}', "messages.0"),
        (ChatBody, b'{"model": "m", "messages": [{"role": "user"}]}', "messages.0.content"),
        (ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": null}]}', "messages.0.content"),
        (ChatBody, b'{"model": "m", "messages": [{"role": "tool", "content": "Hi"}]}', "messages.0.role"),
        (ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": "a", "name": "b"}]}', "messages.0.name"),
        (
            ChatBody,
            b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
            "messages.0.content.0.type",
        ),
        (CompletionBody, b'{"model": "m"}', "prompt"),
        (CompletionBody, b'{"model": "m", "prompt": 3}', "prompt"),
        (CompletionBody, b'{"model": "m", "prompt": [1, "a"]}', "prompt"),
        (CompletionBody, b'{"model": "m", "prompt": "a", "draft": "auto"}', "draft"),
        (CompletionBody, b'{"model": "m", "prompt": {"a": 1}}', "prompt"),
    ],
)
def test_malformed_body(kind: type[GenerationBody], body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param
    assert caught.value.body()["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation"),
        ({"verification": {"policy": "budgeted"}}, "verification.policy"),
        ({"verification": {"policy": "loose"}}, "verification.policy"),
        ({"verification": {"policy": "strict", "budget": 2}}, "verification.budget"),
        ({"verification": {"gate": 2}}, "verification.gate"),
        ({"temperature": 0, "verification": {"policy": "budgeted", "budget": -1}}, "verification.budget"),
        ({"temperature": 0, "verification": {"policy": "budgeted", "cap": 1.5}}, "verification.cap"),
        ({"temperature": 0, "verification": {"policy": "budgeted", "variant": "best"}}, "verification.variant"),
        ({"temperature": 0, "verification": {"policy": "budgeted", "tax": 1}}, "verification.tax"),
        ({"verification": "strict"}, "verification"),
        ({"draft": {"source": "oracle"}}, "draft.source"),
        ({"draft": {"tokens": 3}}, "draft.tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"min_p": 0.1}, "min_p"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_refused_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rpartition(".")[2] in caught.value.message


@pytest.mark.parametrize("stop", [["a", "b", "c", "d", "e"], [""], ""])
def test_stop_limits_are_the_samplers(stop: object) -> None:
    with pytest.raises(ApiError, match="stop: must be at most 4 non-empty strings, not \\[") as raised:
        chat(stop=stop)
    assert raised.value.param == "stop"


def test_what_exists_is_listed() -> None:
    with pytest.raises(ApiError, match="strict"):
        chat(verification={"policy": "tiered"})
    with pytest.raises(ApiError, match="suffix"):
        chat(draft={"source": "oracle"})


def test_values_that_ask_for_nothing_pass() -> None:
    neutral = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    assert chat(**neutral).prompts == chat().prompts
    assert chat(**dict.fromkeys(UNSUPPORTED)).prompts == chat().prompts
    assert chat(temperature=None, stop=None, stream_options=None, user="someone").sampling.temperature == 1.0


def test_meaning_of_a_chat_request() -> None:
    got = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            *USER,
            {"role": "assistant", "content": "Yes?", "refusal": None, "tool_calls": None, "annotations": []},
        ],
        max_completion_tokens=7,
        temperature=0,
        top_p=0.9,
        top_k=-1,
        seed=-1,
        stop="END",
        stop_token_ids=[5],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        draft={"source": "suffix"},
    )
    assert got.prompts == (
        [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Yes?"}],
    )
    assert (got.max_tokens, got.sampling.max_new_tokens) == (7, 7)
    assert (got.sampling.temperature, got.sampling.top_p) == (0.0, 0.9)
    assert got.sampling.seed == -1
    assert (got.sampling.stop, got.sampling.stop_token_ids) == (("END",), (5,))
    assert (got.policy, got.draft_source, got.stream, got.include_usage) == (STRICT, "suffix", True, True)
    assert got.reproducible
    assert [got.choice(index)[1].stream for index in range(got.num_choices)] == [0, 1]


def test_defaults() -> None:
    got = chat()
    assert (got.max_tokens, got.sampling.temperature, got.draft_source, got.n) == (None, 1.0, "auto", 1)
    assert got.sampling.max_new_tokens > 1_000_000
    assert got.sampling.seed is not None
    assert chat().sampling.seed != got.sampling.seed
    assert completion().sampling.max_new_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompts_of_a_completion(prompt: object, prompts: tuple[object, ...]) -> None:
    got = completion(prompt=prompt, n=2)
    assert got.prompts == prompts
    assert [got.choice(index)[0] for index in range(got.num_choices)] == [p for p in prompts for _ in range(2)]


def test_a_policy_takes_what_it_does_not_name_from_the_endpoint() -> None:
    settings = Settings().override("verification.policy=budgeted", "verification.budget=3", "verification.cap=1")
    defaults = RequestDefaults.from_settings(settings)

    def policy(**fields: object) -> VerificationPolicy:
        return parse(ChatBody, json.dumps({"model": "m", "messages": USER} | fields).encode(), defaults).policy

    assert policy(temperature=0) == VerificationPolicy("budgeted", budget=3.0, cap=1)
    assert policy(temperature=0, verification={"gate": 1, "budget": 2.5}) == VerificationPolicy(
        "budgeted", budget=2.5, gate=1.0, cap=1
    )
    assert policy(temperature=0, verification={"policy": "strict"}).name == "strict"
    assert policy().name == "strict"  # sampled, for which a lossy default is not defined


@pytest.mark.parametrize(
    ("overrides", "fields", "reproducible"),
    [
        ((), {}, True),
        (("draft.router=cost",), {}, False),
        (("draft.shared_tokens=1000",), {}, False),
        (("draft.router=cost",), {"draft": {"source": "suffix"}}, True),
        (("draft.router=cost",), {"verification": {"policy": "strict"}}, True),
    ],
)
def test_a_lossy_answer_is_reproducible_while_its_drafts_are(
    overrides: tuple[str, ...], fields: dict[str, object], reproducible: bool
) -> None:
    defaults = RequestDefaults.from_settings(Settings().override(*overrides))
    body = {"model": "m", "messages": USER, "temperature": 0, "verification": {"policy": "budgeted"}} | fields
    assert parse(ChatBody, json.dumps(body).encode(), defaults).reproducible == reproducible
