"""What ingress and cell say to each other about one choice.

The ingress sends a `CellRequest`; the cell answers with `Admitted`, any number of `Block`, then `Finished`. `Failed`
may come at any time and is the last word.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric

from actors.openai_errors import ApiError
from actors.openai_protocol import DraftSource, GenerationRequest, Prompt
from tierspec.decoding import DecodingStats
from tierspec.sampling import SamplingParams
from tierspec.verification import VerificationPolicy


@dataclass(frozen=True)
class CellRequest:
    """One choice. `limit_is_hard`: the client named the limit, so prompt + limit over the context is an error."""

    prompt: Prompt
    sampling: SamplingParams
    limit_is_hard: bool
    policy: VerificationPolicy
    draft_source: DraftSource

    @classmethod
    def of(cls, generation: GenerationRequest, index: int) -> CellRequest:
        prompt, sampling = generation.choice(index)
        return cls(prompt, sampling, generation.max_tokens is not None, generation.policy, generation.draft_source)


@dataclass(frozen=True)
class Admitted:
    """The sequence has a place; nothing that a client can have done wrong is left to find."""

    prompt_tokens: int


@dataclass(frozen=True)
class Block:
    """Newly committed tokens. `text` may lag behind them: half a character, or what may become a stop string."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Finished:
    """`stats` counts this sequence alone. `budget_left`: nats that a lossy policy did not spend; 0 under strict."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    stats: DecodingStats
    budget_left: float = 0.0


@dataclass(frozen=True)
class Failed:
    error: ApiError


CellEvent = Admitted | Block | Finished | Failed


@dataclass(frozen=True)
class TierStatus:
    """`ready` is false of a lost tier, while it is being started again or, with `given_up`, for good; `pid` is its
    process."""

    ready: bool
    pid: int
    threads: int
    given_up: bool = False


@dataclass(frozen=True)
class CellDescription:
    """What a cell serves, as `/v1/models` and `/health` tell it. `drafter` None: no neural drafter."""

    max_context: int
    created: int
    drafter: str | None
    placement: str
    tiers: dict[str, TierStatus]


class Cells(Protocol):
    """All cells of the endpoint, as the ingress sees them."""

    def generate(self, request: CellRequest) -> AsyncIterator[CellEvent]:
        """Events of one choice from a cell with room. Closing the iterator frees the sequence everywhere."""

    async def describe(self) -> CellDescription: ...

    async def metrics(self) -> list[list[Metric]]:
        """One snapshot per cell."""
