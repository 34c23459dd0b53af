"""The cell: one Serve replica that holds the tiers and runs the engine over them. A sequence lives in one cell.

The replica's event loop only passes events on. The engine has a thread of its own, and so has every colocated tier.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

from prometheus_client.metrics_core import Metric

from actors.cell_protocol import Admitted, Block, CellDescription, CellEvent, CellRequest, Failed, Finished
from actors.cell_tiers import CellTiers
from actors.engine_thread import EngineThread
from actors.metrics import CellMetrics
from actors.openai_errors import ApiError, overloaded, server_error, took_too_long
from actors.openai_protocol import Prompt, invalid_value
from actors.placement import CellPlacement
from actors.tiers import Models
from tierspec.config import Settings
from tierspec.decoding import (
    AsyncDriver,
    ChannelLost,
    DecodingStats,
    DraftOptions,
    DraftSources,
    Engine,
    EngineLimits,
    Sequence,
    text_decoder,
)
from tierspec.drafters.payoff import load_payoff
from tierspec.errors import SettingError
from tierspec.models import PAGE_TOKENS
from tierspec.models.chat import encode_chat
from tierspec.models.loading import load_tokenizer, resolve_source

logger = logging.getLogger("tierspec.cell")

CLOSE_S = 10.0


class Cell:
    """The Serve deployment. `drafter_path` None: drafts come from the suffix cache alone. `payoff_path`: folder of the
    payoff predictor, for the routers that are learned."""

    def __init__(
        self,
        settings: Settings,
        drafter_path: str | None,
        placement: CellPlacement,
        payoff_path: str | None = None,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._created = int(time.time())
        self._drafter_path = drafter_path
        self._metrics = CellMetrics()
        colocated = settings.serve.placement == "colocated"
        models = Models(settings, drafter_path) if colocated else None
        source = settings.target.source
        self._tokenizer = models.target.tokenizer if models else load_tokenizer(resolve_source(source))
        self._tiers = CellTiers(settings, drafter_path, placement, models, self._metrics)
        self._thread = EngineThread()
        self._thread.run(self._tiers.start()).result()
        facts = self._tiers.facts["verifier"]
        decoding = settings.decoding
        # an answer without a limit of its own must fit the cache, too
        self._max_context = min(facts.max_context, decoding.token_budget // PAGE_TOKENS * PAGE_TOKENS)
        limits = EngineLimits(
            max_running=decoding.max_running,
            token_budget=decoding.token_budget,
            prefill_tokens=decoding.prefill_tokens,
            max_draft_tokens=max(settings.draft.max_tokens, settings.draft.suffix.max_tokens),
            max_context=self._max_context,
            groups=decoding.groups,
            vocab_size=facts.vocab_size,
        )
        predictor = None
        if payoff_path is not None:
            suffix = settings.draft.suffix.model_dump(mode="json")
            predictor = load_payoff(Path(payoff_path), vocab_size=facts.vocab_size, suffix=suffix)
        sources = DraftSources.from_settings(settings.draft, predictor)
        self._engine = Engine(
            limits, drafter=facts.drafter, sources=sources, decode=text_decoder(self._tokenizer), eos_ids=facts.eos_ids
        )
        self._driver = AsyncDriver(self._engine, self._tiers.channels, restart=self._tiers.restart)
        self._driving = self._thread.run(self._driver.run())
        self._draft = DraftOptions.from_settings(settings.draft)
        self._capacity = decoding.max_running + settings.serve.max_queue
        self._timeout_s = settings.serve.request_timeout_s
        self._live: dict[str, Sequence] = {}
        self._num_open = 0
        logger.info("cell ready: %s", self._tiers.facts)

    async def generate(self, request: CellRequest) -> AsyncIterator[CellEvent]:
        """Events of one choice. A client that leaves closes this generator, which frees its places in every tier; if
        nobody is there to close it, `serve.request_timeout_s` does."""
        if self._num_open >= self._capacity:
            self._metrics.rejected.inc()
            yield Failed(overloaded(self._capacity))
            return
        self._num_open += 1
        arrival = time.monotonic()
        sequence: Sequence | None = None
        try:
            sequence = await asyncio.to_thread(self._sequence, request, arrival)
            self._live[sequence.id] = sequence
            async with await self._driver.submit(sequence) as stream:
                self._metrics.prompt_tokens.inc(sequence.prompt_length)
                yield Admitted(sequence.prompt_length)
                last = None
                async for event in stream:
                    if time.monotonic() - arrival > self._timeout_s:
                        raise took_too_long(self._timeout_s)
                    if event.finish_reason == "abort":
                        raise ChannelLost("the endpoint is stopping")
                    last = self._count(len(event.token_ids), arrival, last)
                    yield Block(tuple(event.token_ids), event.text_delta or "")
            assert sequence.finish_reason is not None
            num_tokens, policy = len(sequence.output_ids), sequence.policy
            left = policy.left(sequence.ledger, num_tokens) if policy.lossy else 0.0
            yield Finished(sequence.finish_reason, sequence.prompt_length, num_tokens, sequence.stats, left)
        except ApiError as error:
            yield Failed(error)
        except SettingError as error:
            yield Failed(invalid_value(error))
        except ChannelLost as error:
            yield Failed(server_error(f"the cell cannot go on: {error}", status=503))
        finally:
            self._num_open -= 1
            if sequence is not None:
                self._live.pop(sequence.id, None)
                self._metrics.requests.labels(finish_reason=sequence.finish_reason or "abort").inc()

    async def describe(self) -> CellDescription:
        return CellDescription(
            max_context=self._max_context,
            created=self._created,
            drafter=self._drafter_path,
            placement=self._settings.serve.placement,
            tiers=self._tiers.status(),
        )

    async def metrics(self) -> list[Metric]:
        """A snapshot; what only the engine knows is read on its thread, between two of its steps."""

        def totals() -> DecodingStats:
            total = DecodingStats()
            total.merge(self._engine.stats)
            for sequence in self._live.values():
                if sequence.finish_reason is None:
                    total.merge(sequence.stats)
            self._metrics.running.set(self._engine.num_running)
            self._metrics.waiting.set(self._engine.num_waiting)
            return total

        self._metrics.count_decoding(await self._thread.ask(totals))
        return self._metrics.snapshot()

    def check_health(self) -> None:
        """Serve replaces a replica whose check fails."""
        if self._driving.done():
            raise RuntimeError(f"the engine has ended: {self._driving.exception()}")

    def __del__(self) -> None:
        """Serve calls it when the replica is drained, and Python once more."""
        driving = self.__dict__.pop("_driving", None)
        if driving is not None:
            self._driver.close()
            wait([driving], CLOSE_S)
            self._tiers.close()
            self._thread.close()

    def _sequence(self, request: CellRequest, arrival: float) -> Sequence:
        ids = self._encode(request.prompt)
        room = self._max_context - len(ids)
        asked = request.sampling.max_new_tokens
        if room < 1 or (request.limit_is_hard and asked > room):
            limit = f" and max_tokens {asked}" if request.limit_is_hard else ""
            raise ApiError(
                f"{len(ids)} prompt tokens{limit} do not fit the context of {self._max_context} tokens",
                param="max_tokens" if room > 0 else _param(request.prompt),
                code="context_length_exceeded",
            )
        sampling = replace(request.sampling, max_new_tokens=min(asked, room))
        draft = replace(self._draft, source=request.draft_source)
        return Sequence(uuid.uuid4().hex, ids, sampling, draft, request.policy, arrival)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        messages = [part for part in prompt if isinstance(part, dict)]
        if messages:
            return encode_chat(self._tokenizer, messages)
        return [part for part in prompt if isinstance(part, int)]

    def _count(self, num_tokens: int, arrival: float, last: float | None) -> float:
        """Counts a block that came after the one at `last` (None: it is the first); returns its time."""
        now = time.monotonic()
        self._metrics.generation_tokens.inc(num_tokens)
        if last is None:
            self._metrics.time_to_first_token.observe(now - arrival)
        elif num_tokens:
            self._metrics.inter_token_latency.observe((now - last) / num_tokens)
        return now


def _param(prompt: Prompt) -> str:
    """The field of the request that holds the prompt."""
    return "messages" if any(isinstance(part, dict) for part in prompt) else "prompt"
