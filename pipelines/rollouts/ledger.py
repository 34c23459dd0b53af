"""The running total of a rollout: what workers have answered so far, and whether they should go on."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from tqdm import tqdm

STOPPED = "stopped"
BUDGET_SPENT = "token budget spent"
_POLL_S = 0.5


@dataclass(frozen=True)
class Totals:
    """Answers and response tokens of all workers, `seconds` since the first was ready to decode, and why no new prompt
    should be begun ("" to go on)."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stop_reason: str = ""


class Ledger:
    """A Ray actor's class: workers report their own running totals and hear whether to go on."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._answers: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._stop_reason = ""
        self._began: float | None = None

    def report(self, worker: str, answers: int, tokens: int) -> Totals:
        self._began = self._began or time.monotonic()
        self._answers[worker], self._tokens[worker] = answers, tokens
        if self._token_budget and sum(self._tokens.values()) >= self._token_budget:
            self.stop(BUDGET_SPENT)
        return self.totals()

    def stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def totals(self) -> Totals:
        seconds = time.monotonic() - self._began if self._began else 0.0
        return Totals(sum(self._answers.values()), sum(self._tokens.values()), seconds, self._stop_reason)


@contextlib.contextmanager
def watched_ledger(
    token_budget: int, *, asked: int, finished: int, label: str, stop: Callable[[], bool]
) -> Iterator[Any]:
    """A ledger actor, and while the block runs a progress bar on standard error that also passes on `stop`.

    Args:
        token_budget: response tokens after which no new prompt is begun; 0 for no limit.
        asked: answers wanted in all; `finished` of them are there already.
    """
    ledger: Any = ray.remote(Ledger).options(num_cpus=0).remote(token_budget)
    over = threading.Event()
    terminal = sys.stderr.isatty()
    with tqdm(
        desc=label, total=asked, initial=finished, unit=" answers", file=sys.stderr, mininterval=0.5 if terminal else 15
    ) as bar:

        def show() -> None:
            totals: Totals = ray.get(ledger.totals.remote())
            bar.set_postfix_str(f"{totals.tokens / max(totals.seconds, _POLL_S):.0f} tokens/s", refresh=False)
            bar.update(finished + totals.answers - bar.n)

        def watch() -> None:
            with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone first when a run is cut short
                while not over.wait(_POLL_S):
                    if stop():
                        ledger.stop.remote(STOPPED)
                    show()

        watcher = threading.Thread(target=watch, name="rollout-progress", daemon=True)
        watcher.start()
        try:
            yield ledger
            over.set()
            watcher.join()
            show()
        finally:
            over.set()
            watcher.join(timeout=10 * _POLL_S)
            ray.kill(ledger)
