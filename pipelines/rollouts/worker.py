"""The rollout actor: it loads the target once and answers the shards that Ray Data hands it.

Many shards are in work at a time and their prompts pass through one engine in the order of arrival. So the engine stays
full although each shard waits for its slowest answer; it drains only where the prompts end.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.prompts.overlap import index_of
from pipelines.prompts.prompt import Prompt, parse_row
from pipelines.prompts.self_written import open_user_turn, rejection
from pipelines.rollouts.engine import Answer, EngineThread
from pipelines.rollouts.ledger import Totals
from pipelines.rollouts.plan import RolloutJob, seed_of, turn_id, writing_job
from pipelines.rollouts.schema import DONE, FAILED, OUTCOME_SCHEMA, SKIPPED
from tierspec.config import Settings
from tierspec.errors import SettingError
from tierspec.models.loading import load_target
from tierspec.sampling import SamplingParams

TOO_LONG = "longer than the context"
_REPORT_S = 0.5
_AHEAD = 4  # conversations begun beyond the engine's slots, so that a freed slot finds a prompt waiting


@dataclass
class _Shard:
    """A shard is begun or left as a whole, so that stopping leaves no partial ones."""

    begun: bool = False


class _Skipped(Exception):
    """Why a turn gets no answer although nothing failed."""


class RolloutWorker:
    """A class for `Dataset.map_batches`: takes the prompts of a shard, gives the outcome of every turn.

    In: columns `shard` and `prompt` (JSON). Out: OUTCOME_SCHEMA and `shard`; no rows if the shard was not begun.
    """

    def __init__(self, settings: Settings, job: RolloutJob, ledger: Any, heldout: Sequence[Prompt] = ()) -> None:
        target, self._job, self._ledger = settings.target, job, ledger
        self._target = load_target(target.source, dtype=target.dtype, device=target.device, numerics=target.numerics)
        self._context = min(target.max_context or self._target.config.max_context, self._target.config.max_context)
        self._writing, self._heldout = writing_job(settings), index_of(heldout)
        self._engine = EngineThread(self._target, settings)
        self._places = asyncio.Semaphore(settings.rollout.slots + _AHEAD)
        self._name = uuid.uuid4().hex
        self._answers = self._tokens = 0
        self._stop_reason = ""
        self._reporting: asyncio.Task[None] | None = None

    async def __call__(self, batch: pa.Table) -> pa.Table:
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._keep_reporting())
        shard = _Shard()
        prompts = [parse_row(json.loads(row), "") for row in batch.column("prompt").to_pylist()]
        answered = await asyncio.gather(*(self._converse(prompt, shard) for prompt in prompts))
        await self._report()
        outcomes = pa.Table.from_pylist([row for rows in answered for row in rows], schema=OUTCOME_SCHEMA)
        number = batch.column("shard")[0].as_py()
        return outcomes.append_column("shard", pa.array([number] * outcomes.num_rows, pa.int64()))

    async def _converse(self, prompt: Prompt, shard: _Shard) -> list[dict[str, Any]]:
        """The outcome of each turn; a turn that cannot be answered takes those after it along."""
        async with self._places:
            if self._stop_reason and not shard.begun:
                return []
            shard.begun = True
            messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
            rows: list[dict[str, Any]] = []
            outcome, reason = DONE, ""
            for number in range(self._job.asks([prompt])):
                row = self._blank_row(prompt, number)
                if outcome == DONE:
                    try:
                        await self._turn(prompt, number, messages, row)
                    except _Skipped as skipped:
                        outcome, reason = SKIPPED, str(skipped)
                    except SettingError as error:
                        outcome, reason = FAILED, str(error)
                rows.append(row | {"outcome": outcome, "reason": reason})
                if outcome == DONE:
                    text = self._target.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
                    messages.append({"role": "assistant", "content": text})
                    self._tokens += len(row["response_ids"])
                self._answers += 1
            return rows

    async def _turn(self, prompt: Prompt, number: int, messages: list[dict[str, str]], row: dict[str, Any]) -> None:
        """Let the user speak, in the prompt's words or in the target's, and the target answer, into `row`."""
        if self._job.opens_user_turn:
            prompt_ids, answer = await self._write(self._job, [], row["seed"], "prompts.self_written")
        else:
            spoken = prompt.turns[number] if number < len(prompt.turns) else await self._follow_up(messages, row)
            messages.append({"role": "user", "content": spoken})
            prompt_ids = self._target.encode_chat(messages)
            answer = await self._sample(self._job, prompt_ids, row["seed"])
        row.update(prompt_ids=prompt_ids, response_ids=answer.token_ids, finish_reason=answer.finish_reason)

    async def _follow_up(self, messages: list[dict[str, str]], row: dict[str, Any]) -> str:
        seed = seed_of(self._job.seed, f"{row['sample_id']}/user")
        _, written = await self._write(self._writing, messages, seed, "prompts.follow_ups")
        text = self._target.tokenizer.decode(written.token_ids).strip()
        if unusable := rejection(text, written.token_ids, written.finish_reason):
            raise _Skipped(f"follow-up not used: {unusable}")
        if self._heldout.overlaps(text):
            raise _Skipped("follow-up not used: contaminated")
        return text

    async def _write(
        self, job: RolloutJob, messages: list[dict[str, str]], seed: int, setting: str
    ) -> tuple[list[int], Answer]:
        """What a user might say after `messages`."""
        opening = open_user_turn(self._target.tokenizer, self._target.eos_ids, messages, setting=setting)
        prompt_ids = list(opening.token_ids)
        return prompt_ids, await self._sample(job, prompt_ids, seed, opening.stop_token_ids)

    async def _sample(self, job: RolloutJob, prompt_ids: list[int], seed: int, stops: tuple[int, ...] = ()) -> Answer:
        room = self._context - len(prompt_ids)
        if room < 1:
            raise _Skipped(f"{TOO_LONG} ({len(prompt_ids)} of {self._context} tokens)")
        sampling = SamplingParams(
            max_new_tokens=min(job.max_new_tokens, room),
            temperature=job.temperature,
            top_p=job.top_p,
            top_k=job.top_k,
            seed=seed,
            stop_token_ids=stops,
        )
        return await asyncio.wrap_future(self._engine.submit(prompt_ids, sampling))

    def _blank_row(self, prompt: Prompt, turn: int) -> dict[str, Any]:
        sample_id = turn_id(prompt.sample_id, turn)
        return {
            "sample_id": sample_id,
            "source": prompt.source,
            "prompt_ids": [],
            "response_ids": [],
            "finish_reason": "",
            "temperature": self._job.temperature,
            "top_p": self._job.top_p,
            "top_k": self._job.top_k,
            "seed": seed_of(self._job.seed, sample_id),
            "target": self._target.source,
            "template_hash": self._target.template_hash,
        }

    async def _report(self) -> None:
        totals: Totals = await self._ledger.report.remote(self._name, self._answers, self._tokens)
        self._stop_reason = totals.stop_reason

    async def _keep_reporting(self) -> None:
        """Tell the ledger how far this worker is; ends with the actor, or with the ledger."""
        with contextlib.suppress(Exception):
            while True:
                await self._report()
                await asyncio.sleep(_REPORT_S)
