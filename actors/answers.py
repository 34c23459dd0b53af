"""One HTTP answer out of the events of its choices, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from actors.cell_protocol import Admitted, Block, CellEvent, Failed, Finished
from actors.openai_errors import ApiError, server_error, took_too_long
from actors.openai_responses import Reply, error_event

logger = logging.getLogger("tierspec.ingress")


async def merged(
    sources: Sequence[AsyncIterator[CellEvent]], timeout_s: float
) -> AsyncGenerator[tuple[int, CellEvent], None]:
    """Events of all choices as they come, each with its choice's index; ends when every choice has.

    Raises the ApiError of a `Failed` event, and 504 after `timeout_s` in all. Closing it closes every source.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    queue: asyncio.Queue[tuple[int, CellEvent]] = asyncio.Queue()

    async def pump(index: int, source: AsyncIterator[CellEvent]) -> None:
        try:
            async for event in source:
                queue.put_nowait((index, event))
        except Exception as error:
            logger.exception("a cell broke off")
            queue.put_nowait((index, Failed(server_error(f"the cell broke off: {type(error).__name__}", status=503))))

    pumps = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    running = len(pumps)
    try:
        while running:
            try:
                index, event = await asyncio.wait_for(queue.get(), deadline - loop.time())
            except TimeoutError as error:
                raise took_too_long(timeout_s) from error
            if isinstance(event, Failed):
                raise event.error
            running -= isinstance(event, Finished)
            yield index, event
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def all_admitted(
    events: AsyncGenerator[tuple[int, CellEvent], None], num_choices: int
) -> list[tuple[int, CellEvent]]:
    """Reads until every choice has a place, so that a refusal is still a status and not an event in the stream."""
    seen: list[tuple[int, CellEvent]] = []
    try:
        while sum(isinstance(event, Admitted) for _, event in seen) < num_choices:
            seen.append(await anext(events))
    except BaseException:
        await events.aclose()
        raise
    return seen


async def whole_answer(reply: Reply, events: AsyncIterator[tuple[int, CellEvent]]) -> dict[str, object]:
    texts = [""] * reply.generation.num_choices
    reasons = [""] * reply.generation.num_choices
    async for index, event in events:
        if isinstance(event, Block):
            texts[index] += event.text
        elif isinstance(event, Finished):
            reasons[index] = event.finish_reason
            reply.count(index, event)
    return reply.body(texts, reasons)


async def streamed_answer(
    reply: Reply, opened: list[tuple[int, CellEvent]], events: AsyncGenerator[tuple[int, CellEvent], None]
) -> AsyncIterator[str]:
    """Server-sent events of one answer: `opened` are events already read, `events` the rest.

    What goes wrong from here on is an error event, and the stream ends.
    """
    async with aclosing(events):
        for chunk in reply.opening():
            yield chunk
        try:
            async for index, event in _chained(opened, events):
                if isinstance(event, Block) and event.text:
                    yield reply.text(index, event.text)
                elif isinstance(event, Finished):
                    reply.count(index, event)
                    yield reply.finish(index, event.finish_reason)
        except ApiError as error:
            yield error_event(error)
            return
        for chunk in reply.closing():
            yield chunk


async def _chained(
    first: list[tuple[int, CellEvent]], rest: AsyncIterator[tuple[int, CellEvent]]
) -> AsyncIterator[tuple[int, CellEvent]]:
    for item in first:
        yield item
    async for item in rest:
        yield item
