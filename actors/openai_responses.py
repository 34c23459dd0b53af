"""Answers of OpenAI's API: whole bodies and server-sent chunks, built from the cell's events.

The extension field `tierspec` says how the answer was made: the seed, the verification policy, whether the same
request with that seed gets the same text, the draft source asked for, which source wrote how many tokens, and the
accept length.
Under a lossy policy `verification` has its limits and the ledger of every choice; send the `budget_left` of one as the
`budget` of the next turn to bound a whole conversation.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict
from typing import Any

from actors.cell_protocol import Finished
from actors.openai_errors import ApiError
from actors.openai_protocol import GenerationRequest
from tierspec.decoding import DecodingStats

Json = dict[str, Any]
DONE = "data: [DONE]\n\n"


def server_sent(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_event(error: ApiError) -> str:
    """For what goes wrong after the first byte, when the status is already 200."""
    return server_sent(error.body())


def model_card(name: str, created: int, max_context: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "tierspec", "max_model_len": max_context}


class Reply:
    """The answer to one request: identity and shape common to its body and to all of its chunks."""

    def __init__(self, generation: GenerationRequest) -> None:
        self.generation = generation
        self._stats = DecodingStats()
        self._ledgers: list[Json] = [{} for _ in range(generation.num_choices)]
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._id = ("chatcmpl-" if generation.chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    def count(self, index: int, choice: Finished) -> None:
        """Add finished choice `index` to the usage. A prompt with several choices counts once."""
        self._ledgers[index] = {
            "spent": choice.stats.deviation,
            "exceptions": choice.stats.exceptions,
            "budget_left": choice.budget_left,
        }
        self._stats.merge(choice.stats)
        self._prompt_tokens += choice.prompt_tokens
        self._completion_tokens += choice.completion_tokens

    def body(self, texts: list[str], finish_reasons: list[str]) -> Json:
        """The whole answer; call after `count` of every choice."""
        choices = [
            self._choice(index, text, reason, whole=True)
            for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        kind = "chat.completion" if self.generation.chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": self._usage(), "tierspec": self._account()}

    def opening(self) -> list[str]:
        """The first chunk of every chat choice names the role."""
        if not self.generation.chat:
            return []
        return [
            self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for index in range(self.generation.num_choices)
        ]

    def text(self, index: int, text: str) -> str:
        return self._chunk([self._choice(index, text, None, whole=False)])

    def finish(self, index: int, reason: str) -> str:
        return self._chunk([self._choice(index, "", reason, whole=False)], last=True)

    def closing(self) -> list[str]:
        """After the last choice's `finish`: the usage where asked for, and the end mark."""
        usage = [self._chunk([], usage=self._usage(), last=True)] if self.generation.include_usage else []
        return [*usage, DONE]

    def _choice(self, index: int, text: str, reason: str | None, *, whole: bool) -> Json:
        choice: Json = {"index": index, "logprobs": None, "finish_reason": reason}
        if not self.generation.chat:
            return choice | {"text": text}
        if whole:
            return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return choice | {"delta": {"content": text} if text else {}}

    def _chunk(self, choices: list[Json], usage: Json | None = None, last: bool = False) -> str:
        body = self._envelope("chat.completion.chunk" if self.generation.chat else "text_completion", choices)
        if self.generation.include_usage:
            body["usage"] = usage
        if last:
            body["tierspec"] = self._account()
        return server_sent(body)

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.generation.model,
            "choices": choices,
        }

    def _usage(self) -> Json:
        prompt_tokens = self._prompt_tokens // self.generation.n
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._stats.accepted,
                "rejected_prediction_tokens": self._stats.drafted - self._stats.accepted,
            },
        }

    def _account(self) -> Json:
        policy = self.generation.policy
        account = {
            "seed": self.generation.sampling.seed,
            "policy": policy.name,
            "reproducible": self.generation.reproducible,
            "draft_source": self.generation.draft_source,
            "tokens_by_source": dict(self._stats.tokens_by_source),
            "accept_len": round(self._stats.accept_len, 4),
        }
        if not policy.lossy:
            return account
        limits = {name: value for name, value in asdict(policy).items() if name != "name"}
        return account | {"verification": limits | {"choices": self._ledgers}}
