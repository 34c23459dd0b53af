"""The tiers of one cell: started, reached, counted, and started again when they are lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cell_protocol import TierStatus
from actors.channels import ActorChannel, InprocChannel
from actors.metrics import CellMetrics
from actors.placement import CellPlacement
from actors.tiers import DrafterActor, FullVerifierActor, Models, TierFacts
from tierspec.config import Settings
from tierspec.decoding import Channel, ChannelLost, TierMessage, TierName, TierReply
from tierspec.threads import usable_cores

logger = logging.getLogger("tierspec.cell")

MAX_LOSSES = 5
LOSS_WINDOW_S = 300.0
"""A tier lost more than MAX_LOSSES times in this window is given up: something that it is sent breaks it each time."""


class ClosableChannel(Channel, Protocol):
    kind: str

    def close(self) -> None: ...


class MeteredChannel:
    """A channel that counts what passes: the tier's seconds, its rows, and what the way itself took."""

    def __init__(self, tier: TierName, inner: ClosableChannel, metrics: CellMetrics) -> None:
        self._inner = inner
        self._tokens = metrics.tier_tokens.labels(tier=tier)
        self._seconds = metrics.tier_seconds.labels(tier=tier)
        self._way = metrics.channel_seconds.labels(channel=inner.kind, edge=tier)

    async def call(self, message: TierMessage) -> TierReply:
        started = time.perf_counter()
        reply = await self._inner.call(message)
        self._way.observe(max(0.0, time.perf_counter() - started - reply.seconds))
        if message.items:
            self._seconds.observe(reply.seconds)
            self._tokens.inc(sum(len(item.token_ids) for item in message.items))
        return reply

    def close(self) -> None:
        self._inner.close()


class CellTiers:
    """All tiers of a cell. Colocated ones share this process's `models`; the others (`models` None) are Ray actors,
    each in its own bundle of this replica's placement group, and end with the replica.
    """

    def __init__(
        self,
        settings: Settings,
        drafter_path: str | None,
        placement: CellPlacement,
        models: Models | None,
        metrics: CellMetrics,
    ) -> None:
        self.channels: dict[TierName, Channel] = {}
        self.facts: dict[TierName, TierFacts] = {}
        self._ready: dict[TierName, bool] = {}
        self._given_up: set[TierName] = set()
        self._settings = settings
        self._drafter_path = drafter_path
        self._placement = placement
        self._models = models
        self._metrics = metrics
        self._open: dict[TierName, MeteredChannel] = {}
        self._losses: dict[TierName, deque[float]] = {tier: deque(maxlen=MAX_LOSSES + 1) for tier in placement.tiers}

    async def start(self) -> None:
        """Starts all tiers at once; returns when they are loaded. Raises what the first one to fail raised."""
        tiers = list(self._placement.tiers)
        self.channels = dict(zip(tiers, await asyncio.gather(*map(self._start, tiers)), strict=True))

    async def restart(self, tier: TierName) -> Channel:
        """A channel to a new, empty tier in place of a lost one.

        Raises ChannelLost if it is lost too often, or is not ready within `serve.start_timeout_s`.
        """
        self._ready[tier] = False
        self._open[tier].close()
        losses, now = self._losses[tier], time.monotonic()
        losses.append(now)
        if len(losses) > MAX_LOSSES and now - losses[0] < LOSS_WINDOW_S:
            self._given_up.add(tier)
            self._metrics.tiers_given_up.labels(tier=tier).inc()
            logger.error("the %s was lost %d times within %g s and is given up", tier, len(losses), LOSS_WINDOW_S)
            raise ChannelLost(f"{tier}: lost {len(losses)} times within {LOSS_WINDOW_S:g} s, given up")
        self._metrics.tier_restarts.labels(tier=tier).inc()
        logger.warning("starting the %s again", tier)
        return await self._start(tier)

    def status(self) -> dict[str, TierStatus]:
        return {
            tier: TierStatus(self._ready[tier], facts.pid, facts.threads, tier in self._given_up)
            for tier, facts in list(self.facts.items())
        }

    def close(self) -> None:
        for channel in self._open.values():
            channel.close()

    async def _start(self, tier: TierName) -> Channel:
        inner, facts = self._in_process(tier) if self._models is not None else await self._in_actor(tier)
        self._ready[tier] = True
        self.facts[tier] = facts
        self._open[tier] = MeteredChannel(tier, inner, self._metrics)
        return self._open[tier]

    def _in_process(self, tier: TierName) -> tuple[ClosableChannel, TierFacts]:
        assert self._models is not None
        threads = self._placement.tiers[tier].threads or usable_cores()
        made = self._models.verifier_tier() if tier == "verifier" else self._models.drafter_tier()
        return InprocChannel(tier, made, threads), TierFacts.of(self._models, threads)

    async def _in_actor(self, tier: TierName) -> tuple[ClosableChannel, TierFacts]:
        place, limit = self._placement.tiers[tier], self._settings.serve.start_timeout_s
        group = ray.util.get_current_placement_group()
        assert group is not None and place.bundle is not None
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle)
        kind: Any = ray.remote(FullVerifierActor if tier == "verifier" else DrafterActor)
        actor = kind.options(num_cpus=place.cpus, num_gpus=place.gpus, scheduling_strategy=bundle).remote(
            self._settings, self._drafter_path, place.threads
        )
        channel = ActorChannel(tier, actor, self._settings.serve.tier_timeout_s)
        ready = asyncio.wrap_future(actor.ping.remote().future())
        done, _ = await asyncio.wait([ready], timeout=limit)
        if done and ready.exception() is None:
            return channel, ready.result()
        channel.close()
        if done and (error := ready.exception()) is not None:
            raise error
        raise ChannelLost(f"{tier}: not ready within {limit:g} s (serve.start_timeout_s)")
