"""Channels: how the engine reaches a tier. Each holds one end; only the engine awaits it.

Both kinds keep one promise (one conformance suite tests it): messages are answered in the order they were sent, a
cancelled call leaves the channel usable, and whatever goes wrong at the other end is a `ChannelLost`, after which the
tier behind it counts as gone, with all that it held.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import ray
import torch
from ray.exceptions import RayError

from tierspec.decoding import ChannelLost, TierMessage, TierReply

logger = logging.getLogger("tierspec.cell")


class Tier(Protocol):
    def handle(self, message: TierMessage) -> TierReply: ...


class InprocChannel:
    """A tier in this process, on a thread of its own with `threads` torch threads.

    torch keeps the number of threads per calling thread, so it is set on the one that computes.
    """

    kind = "inproc"

    def __init__(self, name: str, tier: Tier, threads: int) -> None:
        self.name = name
        self._tier = tier
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix=f"tier-{name}", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def call(self, message: TierMessage) -> TierReply:
        return await _outcome(self.name, self._executor.submit(self._tier.handle, message), None)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class ActorChannel:
    """A tier in a Ray actor, by plain actor calls. An answer that takes longer than `timeout_s` counts as a loss.

    Tensors arrive as copies of their own: torch's pickling does not share Ray's read-only memory.
    """

    kind = "actor"

    def __init__(self, name: str, actor: Any, timeout_s: float) -> None:
        self.name = name
        self._actor = actor
        self._timeout_s = timeout_s

    async def call(self, message: TierMessage) -> TierReply:
        try:
            answer: Future[TierReply] = self._actor.handle.remote(message).future()
        except RayError as error:
            raise ChannelLost(f"{self.name}: {_first_line(error)}") from error
        return await _outcome(self.name, answer, self._timeout_s)

    def close(self) -> None:
        """Ends the actor: a tier that was given up must not go on holding its memory."""
        ray.kill(self._actor)


async def _outcome(name: str, answer: Future[TierReply], timeout_s: float | None) -> TierReply:
    # asyncio.wait neither cancels what it waits for when its time is up nor when it is cancelled itself
    waiting = asyncio.wrap_future(answer)
    waiting.add_done_callback(_mark_retrieved)
    done, _ = await asyncio.wait([waiting], timeout=timeout_s)
    if not done:
        raise ChannelLost(f"{name}: no answer within {timeout_s:g} s")
    try:
        return waiting.result()
    except Exception as error:
        logger.exception("tier %s failed", name)
        raise ChannelLost(f"{name}: {_first_line(error)}") from error


def _mark_retrieved(future: asyncio.Future[TierReply]) -> None:
    if not future.cancelled():
        future.exception()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
