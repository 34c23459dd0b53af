"""A continuous-batching engine on a thread of its own, for callers that wait for whole answers."""

import itertools
import queue
import threading
from collections.abc import Sequence as Ids
from concurrent.futures import Future
from dataclasses import dataclass

from tierspec.config import Settings
from tierspec.decoding import DraftOptions, Engine, EngineLimits, Sequence, SynchronousDriver, VerifierTier
from tierspec.errors import SettingError
from tierspec.models.target import Target
from tierspec.sampling import SamplingParams
from tierspec.threads import use_threads

_PLAIN = DraftOptions(source="none")  # with many rows per forward, drafts only add rows
_NO_DRAFT_TOKENS = 0


@dataclass(frozen=True)
class Answer:
    """`token_ids` without the end-of-sequence token; `finish_reason` is stop or length."""

    token_ids: list[int]
    finish_reason: str


class EngineThread:
    """Decodes what is submitted, `rollout.slots` sequences at once, in the order of submission."""

    def __init__(self, target: Target, settings: Settings) -> None:
        decoding, context = settings.decoding, target.config.max_context
        limits = EngineLimits(
            max_running=settings.rollout.slots,
            token_budget=decoding.token_budget,
            prefill_tokens=decoding.prefill_tokens,
            max_draft_tokens=_NO_DRAFT_TOKENS,
            max_context=min(settings.target.max_context or context, context),
            vocab_size=target.config.vocab_size,
        )
        self._engine = Engine(limits, eos_ids=target.eos_ids)
        verifier = VerifierTier(target, token_budget=decoding.token_budget)
        self._driver = SynchronousDriver(self._engine, {"verifier": verifier})
        self._threads, self._workers = settings.rollout.threads, settings.rollout.workers
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[tuple[Sequence, Future[Answer]]] = queue.SimpleQueue()
        self._open: dict[str, tuple[Sequence, Future[Answer]]] = {}
        threading.Thread(target=self._run, name="rollout-engine", daemon=True).start()

    def submit(self, prompt_ids: Ids[int], sampling: SamplingParams) -> Future[Answer]:
        """The answer to come. The future raises SettingError if the engine cannot decode the prompt, and anything that
        the engine itself fails with."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel what the engine will settle
        sequence = Sequence(str(next(self._numbers)), prompt_ids, sampling, _PLAIN, wants_text=False)
        self._inbox.put((sequence, answer))
        return answer

    def _run(self) -> None:
        use_threads(self._threads, processes=self._workers)
        failure: Exception | None = None
        while True:
            self._take_in(failure)
            if failure is None:
                try:
                    self._step()
                except Exception as error:
                    failure = error
            if failure is not None:
                for _, answer in self._open.values():
                    answer.set_exception(failure)
                self._open.clear()

    def _take_in(self, failure: Exception | None) -> None:
        """Take what was submitted; wait for something if there is nothing else to do."""
        idle = failure is not None or not self._engine.has_work
        while idle or not self._inbox.empty():
            sequence, answer = self._inbox.get()
            idle = False
            try:
                if failure is None:
                    self._engine.add(sequence)
            except SettingError as error:
                answer.set_exception(error)
            else:
                self._open[sequence.id] = sequence, answer

    def _step(self) -> None:
        for event in self._driver.step():
            if event.finish_reason is not None:
                sequence, answer = self._open.pop(event.sequence_id)
                answer.set_result(Answer(sequence.output_ids, event.finish_reason))
