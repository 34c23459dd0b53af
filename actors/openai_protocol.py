"""Requests of OpenAI's API: what is accepted, what is refused, and what they mean for the decoder.

Field names and ranges are OpenAI's, with vLLM's extra ones (`top_k`, `ignore_eos`, `stop_token_ids`). A parameter that
would change the answer and is not supported is refused with 400; it passes only with the value that changes nothing.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from actors.openai_errors import ApiError
from tierspec.config import Settings
from tierspec.errors import SettingError
from tierspec.sampling import SamplingParams, draw_seed
from tierspec.verification import STRICT, VerificationPolicy

Message = dict[str, str]
Prompt = str | list[int] | list[Message]
DraftSource = Literal["auto", "suffix", "neural", "none"]
UNBOUNDED = 2**31 - 1

# parameter -> the values that ask for nothing; any other value is answered 400
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}


@dataclass(frozen=True)
class RequestDefaults:
    """What the endpoint does for a request that does not ask. `steady_drafts`: an automatic draft depends neither on
    measured times nor on other requests."""

    draft_source: DraftSource = "auto"
    policy: VerificationPolicy = STRICT
    steady_drafts: bool = True

    @classmethod
    def from_settings(cls, settings: Settings) -> RequestDefaults:
        draft, policy = settings.draft, VerificationPolicy.from_settings(settings.verification)
        return cls(draft.source, policy, draft.router != "cost" and not draft.shared_tokens)


@dataclass(frozen=True)
class GenerationRequest:
    """One HTTP request in the decoder's terms: every prompt is answered `n` times.

    `max_tokens` is the client's own limit, which must fit the context; `sampling.max_new_tokens` holds it, or else the
    endpoint's default, which is cut to what the context leaves. `reproducible`: sent again with its seed, the request
    is answered alike.
    """

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    sampling: SamplingParams
    policy: VerificationPolicy
    draft_source: DraftSource
    reproducible: bool
    stream: bool
    include_usage: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def choice(self, index: int) -> tuple[Prompt, SamplingParams]:
        """Prompt and sampling of choice `index`; the answers to one prompt differ by their noise stream."""
        return self.prompts[index // self.n], replace(self.sampling, stream=index % self.n)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class StreamOptions(_Body):
    include_usage: bool = False


class VerificationChoice(_Body):
    """What is left out is the endpoint's choice."""

    policy: str | None = None
    budget: Annotated[float, Field(ge=0)] | None = None
    budget_per_token: Annotated[float, Field(ge=0)] | None = None
    gate: Annotated[float, Field(ge=0)] | None = None
    cap: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    variant: str | None = None
    relax_stops: bool | None = None

    def over(self, default: VerificationPolicy, temperature: float) -> VerificationPolicy:
        """The policy of a request at `temperature`. A lossy default holds for the requests that it is defined for.

        Raises SettingError naming the field that is wrong or that the policy does not have.
        """
        asked = self.model_dump(exclude_none=True)
        fallback = "strict" if default.lossy and temperature > 0 else default.name
        chosen = replace(default, name=asked.pop("policy", fallback), **asked)
        chosen.validate(temperature)
        if asked and not chosen.lossy:
            raise SettingError(f"verification.{next(iter(asked))}: the policy '{chosen.name}' does not have it")
        return chosen


class DraftChoice(_Body):
    source: DraftSource | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _echoed_answer(cls, body: Any) -> Any:
        """Clients send an earlier answer back with its empty fields."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if name in {"role", "content"} or value not in (None, [])}

    def plain(self) -> Message:
        """Role and text as chat templates know them; `developer` is OpenAI's newer word for `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class GenerationBody(_Body):
    """What both generation endpoints take."""

    chat: ClassVar[bool]
    default_max_tokens: ClassVar[int]

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    verification: VerificationChoice = Field(default_factory=VerificationChoice)
    draft: DraftChoice = Field(default_factory=DraftChoice)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name in body.keys() & UNSUPPORTED.keys():
            if body[name] is not None and body[name] not in UNSUPPORTED[name]:
                raise PydanticCustomError("unsupported", "{param} is not supported by this endpoint", {"param": name})
        return {name: value for name, value in body.items() if name not in UNSUPPORTED}

    @abstractmethod
    def prompts(self) -> tuple[Prompt, ...]: ...

    def limit(self) -> int | None:
        return self.max_tokens

    def to_generation(self, defaults: RequestDefaults) -> GenerationRequest:
        """Raises ApiError (400) where fields do not fit together."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream: true", param="stream_options", code="invalid_value")
        policy = self.verification.over(defaults.policy, self.temperature)
        source = self.draft.source or defaults.draft_source
        limit = self.limit()
        sampling = SamplingParams(
            max_new_tokens=self.default_max_tokens if limit is None else limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=draw_seed() if self.seed is None else self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )
        sampling.validate()
        return GenerationRequest(
            chat=self.chat,
            model=self.model,
            prompts=self.prompts(),
            n=self.n,
            max_tokens=limit,
            sampling=sampling,
            policy=policy,
            draft_source=source,
            reproducible=not policy.lossy or source != "auto" or defaults.steady_drafts,
            stream=self.stream,
            include_usage=self.stream_options is not None and self.stream_options.include_usage,
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Without a limit the answer may fill the context (as vLLM)."""

    chat = True
    default_max_tokens = UNBOUNDED

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def limit(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError("max_tokens and max_completion_tokens differ", param="max_tokens", code="invalid_value")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self) -> tuple[Prompt, ...]:
        return ([message.plain() for message in self.messages],)


class CompletionBody(GenerationBody):
    """POST /v1/completions. Without a limit: 16 tokens (as OpenAI and vLLM)."""

    chat = False
    default_max_tokens = 16

    prompt: str | list[str] | list[int] | list[list[int]]

    def prompts(self) -> tuple[Prompt, ...]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return (self.prompt,)  # type: ignore[return-value]
        return tuple(self.prompt)


def parse(kind: type[GenerationBody], body: bytes, defaults: RequestDefaults = RequestDefaults()) -> GenerationRequest:
    """Raises ApiError (400) that names the field, for anything but a request that can be answered in full."""
    try:
        return kind.model_validate(from_json(body, allow_inf_nan=False)).to_generation(defaults)
    except ApiError:
        raise
    except ValidationError as error:
        raise _from_validation(error) from error
    except SettingError as error:
        raise invalid_value(error) from error
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def invalid_value(error: SettingError) -> ApiError:
    """The answer to a request that the decoder refuses; its lines begin with the field at fault."""
    field = str(error).partition(":")[0]
    known = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    return ApiError(str(error), param=field if re.split(r"[.\[]", field)[0] in known else None, code="invalid_value")


def _from_validation(error: ValidationError) -> ApiError:
    found = max(error.errors(include_url=False), key=lambda entry: len(entry["loc"]))
    if found["type"] == "unsupported":
        return ApiError(found["msg"], param=found["ctx"]["param"], code="unsupported_parameter")
    param = ".".join(str(part) for part in found["loc"] if not _is_union_tag(part)) or None
    if found["loc"][:1] == ("prompt",) and found["type"] != "missing":
        return ApiError("prompt: expected text, token ids, or a list of either", param="prompt", code="invalid_value")
    if found["type"] in ("model_type", "model_attributes_type"):
        return ApiError(f"{param or 'body'}: expected an object", param=param, code="invalid_value")
    if found["type"] == "extra_forbidden":
        return ApiError(f"{param}: unknown parameter", param=param, code="unknown_parameter")
    code = "missing_required_parameter" if found["type"] == "missing" else "invalid_value"
    return ApiError(f"{param or 'body'}: {found['msg']}", param=param, code=code)


def _is_union_tag(part: int | str) -> bool:
    """pydantic names the branch of a union in an error's place: `str`, `list[int]`."""
    return isinstance(part, str) and (part in {"str", "int"} or part.startswith("list["))
