"""The engine's thread: an event loop that no request runs on, so that none can hold up a round."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class EngineThread:
    """A running event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def ask(self, question: Callable[[], Result]) -> Result:
        """The answer of a short function, run there between two steps of whatever else runs. From any other loop."""

        async def answer() -> Result:
            return question()

        return await asyncio.wrap_future(self.run(answer()))

    def close(self) -> None:
        """Stops the loop; what still runs there is left where it is."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
