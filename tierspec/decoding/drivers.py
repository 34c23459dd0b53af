"""The two drivers of the engine: a loop for the library, and asyncio for a cell whose tiers may be far away."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Protocol

from tierspec.decoding.engine import Engine
from tierspec.decoding.event import Event
from tierspec.decoding.messages import Tier, TierMessage, TierName, TierReply
from tierspec.decoding.sequence import Sequence

logger = logging.getLogger(__name__)


class SynchronousDriver:
    """Runs engine and tiers in the caller's thread."""

    def __init__(self, engine: Engine, tiers: Mapping[TierName, Tier]) -> None:
        self._engine = engine
        self._tiers = tiers

    def step(self) -> list[Event]:
        """One tick: every message that can go out, and what comes of it."""
        events: list[Event] = []
        messages = self._engine.plan()
        if not messages and self._engine.has_work:
            raise RuntimeError("no tier can go on: the verifier is lost")
        for message in messages:
            events.extend(self._engine.absorb(self._tiers[message.tier].handle(message)))
        return events

    def run(self) -> Iterator[Event]:
        """Ticks until nothing is left to do."""
        while self._engine.has_work:
            yield from self.step()


class ChannelLost(RuntimeError):
    """A tier is gone, with all that it held, or did not answer in time."""


class Channel(Protocol):
    """One end of the way to a tier."""

    async def call(self, message: TierMessage) -> TierReply:
        """The tier's reply. Raises ChannelLost when there will be none; time-outs are the channel's."""


class EventStream:
    """The events of one sequence, for the one task that reads them. Leaving it before the end aborts the sequence."""

    def __init__(self, driver: AsyncDriver, sequence_id: str) -> None:
        self._driver = driver
        self._sequence_id = sequence_id
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Aborts the sequence unless it has ended."""
        if not self._ended:
            self._ended = True
            self._driver.abort(self._sequence_id)

    def put(self, item: Event | Exception) -> None:
        """Hands an item to the reader; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class AsyncDriver:
    """Runs an engine on the event loop, and so on the thread, that awaits `run`.

    `submit`, `abort` and `close` may be called from other threads and loops. A lost tier is handed to `restart`, which
    returns a channel to an empty one. Decoding goes on without drafter; without verifier it waits for the new one, and
    if that does not come every stream ends with the error.
    """

    def __init__(
        self,
        engine: Engine,
        channels: Mapping[TierName, Channel],
        *,
        restart: Callable[[TierName], Awaitable[Channel]] | None = None,
    ) -> None:
        self._engine = engine
        self._channels = dict(channels)
        self._restart = restart
        self._streams: dict[str, EventStream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # over _commands, _end and _loop
        self._end: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._closing = False

    async def submit(self, sequence: Sequence) -> EventStream:
        """Queues a sequence and returns its events.

        Raises:
            SettingError: the engine cannot decode it.
            ChannelLost: the driver has ended.
        """
        stream = EventStream(self, sequence.id)
        added: Future[None] = Future()

        def add() -> None:
            if not added.set_running_or_notify_cancel():
                return
            try:
                if self._end is not None:
                    raise self._end
                self._engine.add(sequence)
            except Exception as error:
                added.set_exception(error)
            else:
                self._streams[sequence.id] = stream
                added.set_result(None)

        self._post(add)
        try:
            await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence; its stream, if somebody still reads it, gets a last event. Unknown ids are ignored."""

        def stop() -> None:
            self._engine.abort(sequence_id)
            if (stream := self._streams.pop(sequence_id, None)) is not None:
                stream.put(Event(sequence_id, [], None, "abort", "none", 0))

        self._post(stop)

    def close(self) -> None:
        """Lets `run` return once the messages that are out have been answered; what still runs is aborted."""

        def stop() -> None:
            self._closing = True

        self._post(stop)

    async def run(self) -> None:
        """Decodes until `close`. Raises ChannelLost if the verifier is gone for good, or what the engine raised."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        calls: dict[asyncio.Task[TierReply], TierName] = {}
        restarts: dict[asyncio.Task[Channel], TierName] = {}
        end: Exception = ChannelLost("the driver was closed")
        try:
            while True:
                self._wake.clear()
                self._obey()
                if self._closing:
                    break
                for message in self._engine.plan():
                    call = asyncio.ensure_future(self._channels[message.tier].call(message))
                    self._watch(call)
                    calls[call] = message.tier
                await self._wake.wait()
                for restarted in [task for task in restarts if task.done()]:
                    self._restore(restarts.pop(restarted), restarted)
                for call in [task for task in calls if task.done()]:
                    tier = calls.pop(call)
                    try:
                        self._deliver(self._engine.absorb(call.result()))
                    except ChannelLost as error:
                        restart = self._lose(tier, error)
                        if restart is not None:
                            restarts[restart] = tier
            if calls:
                await asyncio.wait(calls)
        except Exception as error:
            end = error
            raise
        finally:
            for task in restarts:
                task.cancel()
            self._stop(end)

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._end is None:
                self._commands.append(command)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._wake.set)
                return
        command()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _watch(self, task: asyncio.Task) -> None:
        task.add_done_callback(lambda _: self._wake.set())

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams[event.sequence_id]
            if event.finish_reason is not None:
                del self._streams[event.sequence_id]
            stream.put(event)

    def _lose(self, tier: TierName, error: ChannelLost) -> asyncio.Task[Channel] | None:
        logger.warning("lost a tier: %s", error)
        self._engine.tier_lost(tier)
        if self._restart is None:
            if tier == "verifier":
                raise error
            return None
        task = asyncio.ensure_future(self._restart(tier))
        self._watch(task)
        return task

    def _restore(self, tier: TierName, task: asyncio.Task[Channel]) -> None:
        try:
            self._channels[tier] = task.result()
        except Exception as error:
            if tier == "verifier":
                raise
            logger.warning("decoding goes on without drafter: %s", error)
            return
        self._engine.tier_restored(tier)

    def _stop(self, end: Exception) -> None:
        with self._lock:
            self._end = end
        self._obey()
        for sequence_id, stream in self._streams.items():
            self._engine.abort(sequence_id)
            stream.put(end)
        self._streams.clear()
