"""The rollout actor's class, without Ray: what Ray Data hands it and what it hands back."""

import asyncio
import json
from typing import Any

import pyarrow as pa
import pytest

from pipelines.prompts import Prompt
from pipelines.prompts.self_written import open_user_turn
from pipelines.rollouts import worker as worker_module
from pipelines.rollouts.ledger import Ledger, Totals
from pipelines.rollouts.plan import RolloutJob, answering_job, seed_of, writing_job
from pipelines.rollouts.schema import DONE, FAILED, SKIPPED
from pipelines.rollouts.worker import RolloutWorker
from tierspec.config import Settings
from tierspec.decoding import LocalCell
from tierspec.models.target import Target
from tierspec.sampling import SamplingParams


class LocalLedger:
    """Stands in for the handle of a ledger actor."""

    def __init__(self, ledger: Ledger) -> None:
        self.report = self
        self._ledger = ledger

    def remote(self, worker: str, answers: int, tokens: int) -> "asyncio.Future[Totals]":
        reply: asyncio.Future[Totals] = asyncio.get_running_loop().create_future()
        reply.set_result(self._ledger.report(worker, answers, tokens))
        return reply


def shard_of(number: int, *prompts: Prompt) -> pa.Table:
    return pa.table({"shard": [number] * len(prompts), "prompt": [json.dumps(prompt.to_json()) for prompt in prompts]})


def worker_for(settings: Settings, job: RolloutJob | None = None) -> RolloutWorker:
    return RolloutWorker(settings, job or answering_job(settings, "train"), LocalLedger(Ledger(0)))


def run(worker: RolloutWorker, *shards: pa.Table) -> list[list[dict[str, Any]]]:
    async def all_shards() -> list[pa.Table]:
        return list(await asyncio.gather(*map(worker, shards)))

    return [table.to_pylist() for table in asyncio.run(all_shards())]


PROMPTS = [Prompt(f"p{n}", "test", tuple(f"Question {n}, turn {t}?" for t in range(1 + n % 3))) for n in range(6)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_turn_is_answered_with_the_answers_before_it_in_context(
    tiny_settings: Settings, tiny_target: Target, temperature: float
) -> None:
    settings = tiny_settings.override(f"rollout.temperature={temperature}", "run.seed=3")
    rows = [
        row
        for shard in run(worker_for(settings), shard_of(0, *PROMPTS[:3]), shard_of(1, *PROMPTS[3:]))
        for row in shard
    ]

    cell = LocalCell(tiny_target)
    expected = []
    for prompt in PROMPTS:
        messages = []
        for number, turn in enumerate(prompt.turns):
            sample_id = prompt.sample_id + (f"#{number + 1}" if number else "")
            messages.append({"role": "user", "content": turn})
            ids = tiny_target.encode_chat(messages)
            (answer,) = cell.generate([ids], SamplingParams(32, temperature, seed=seed_of(3, sample_id)))
            messages.append({"role": "assistant", "content": answer.text})
            expected.append((sample_id, ids, answer.token_ids, answer.finish_reason))
    assert [(r["sample_id"], r["prompt_ids"], r["response_ids"], r["finish_reason"]) for r in rows] == expected
    assert {row["outcome"] for row in rows} == {DONE}
    assert {(row["target"], row["template_hash"]) for row in rows} == {("embedded:tiny", tiny_target.template_hash)}


@pytest.mark.parametrize("usable", [True, False])
def test_follow_ups_are_written_after_the_answers_and_answered_if_usable(
    tiny_settings: Settings, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    monkeypatch.setattr(worker_module, "rejection", lambda *_: None if usable else "repetitive")
    settings = tiny_settings.override("prompts.follow_ups=2", "rollout.temperature=0.8")
    job, (first, *_) = answering_job(settings, "train"), PROMPTS
    assert job.asks([first]) == 3
    (rows,) = run(worker_for(settings), shard_of(0, first))
    assert [row["sample_id"] for row in rows] == ["p0", "p0#2", "p0#3"]
    if not usable:
        assert [row["outcome"] for row in rows] == [DONE, SKIPPED, SKIPPED]
        assert rows[1]["reason"] == rows[2]["reason"] == "follow-up not used: repetitive"
        return

    cell, tokenizer, writing = LocalCell(tiny_target), tiny_target.tokenizer, writing_job(settings)
    messages: list[dict[str, str]] = []
    for number, row in enumerate(rows):
        spoken = first.turns[0]
        if number:
            opening = open_user_turn(tokenizer, tiny_target.eos_ids, messages, setting="prompts.follow_ups")
            sampling = SamplingParams(
                writing.max_new_tokens,
                writing.temperature,
                top_k=writing.top_k,
                seed=seed_of(job.seed, f"{row['sample_id']}/user"),
                stop_token_ids=opening.stop_token_ids,
            )
            (written,) = cell.generate([list(opening.token_ids)], sampling)
            spoken = tokenizer.decode(written.token_ids).strip()
        messages.append({"role": "user", "content": spoken})
        assert row["prompt_ids"] == tiny_target.encode_chat(messages)
        (answer,) = cell.generate([row["prompt_ids"]], SamplingParams(32, 0.8, seed=row["seed"]))
        assert row["response_ids"] == answer.token_ids
        messages.append({"role": "assistant", "content": answer.text})


def test_a_follow_up_that_is_a_heldout_prompt_is_not_used(
    tiny_settings: Settings, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "rejection", lambda *_: None)
    settings = tiny_settings.override("prompts.follow_ups=1")
    job = answering_job(settings, "train")
    (rows,) = run(worker_for(settings, job), shard_of(0, PROMPTS[0]))
    conversation = tiny_target.tokenizer.decode(rows[1]["prompt_ids"])
    heldout = [Prompt("h", "test", (conversation.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0],))]
    worker = RolloutWorker(settings, job, LocalLedger(Ledger(0)), heldout)
    (rows,) = run(worker, shard_of(0, PROMPTS[0]))
    assert [row["outcome"] for row in rows] == [DONE, SKIPPED]
    assert rows[1]["reason"] == "follow-up not used: contaminated"


def test_a_prompt_longer_than_the_context_is_skipped_with_its_later_turns(tiny_settings: Settings) -> None:
    settings = tiny_settings.override("target.max_context=64", "training.max_length=64")
    long = Prompt("long", "test", ("word " * 100, "and then?"))
    (rows,) = run(worker_for(settings), shard_of(0, PROMPTS[0], long))
    assert [(row["sample_id"], row["outcome"]) for row in rows] == [
        ("p0", DONE),
        ("long", SKIPPED),
        ("long#2", SKIPPED),
    ]
    assert rows[1]["reason"].startswith("longer than the context")
    assert len(rows[0]["prompt_ids"]) + len(rows[0]["response_ids"]) <= 64


def test_a_prompt_the_engine_refuses_has_failed_and_the_others_go_on(tiny_settings: Settings) -> None:
    settings = tiny_settings.override("decoding.token_budget=512")
    refused = Prompt("big", "test", ("word " * 600,))
    (rows,) = run(worker_for(settings), shard_of(0, refused, PROMPTS[0]))
    assert [(row["sample_id"], row["outcome"]) for row in rows] == [("big", FAILED), ("p0", DONE)]
    assert "decoding.token_budget" in rows[0]["reason"]


def test_stopping_finishes_the_shards_that_were_begun_and_no_other(tiny_settings: Settings) -> None:
    ledger = Ledger(0)
    settings = tiny_settings.override("rollout.slots=1")
    worker = RolloutWorker(settings, answering_job(settings, "train"), LocalLedger(ledger))

    async def stop_after_the_first_begins() -> list[pa.Table]:
        first = asyncio.create_task(worker(shard_of(0, *PROMPTS)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ledger.stop("stopped")
        while not worker._stop_reason:
            await asyncio.sleep(0.01)
        return [await first, await worker(shard_of(1, *PROMPTS))]

    begun, left = asyncio.run(stop_after_the_first_begins())
    assert begun.num_rows == sum(len(prompt.turns) for prompt in PROMPTS)
    assert left.num_rows == 0


def test_an_engine_that_breaks_fails_the_shard_instead_of_hanging(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_for(tiny_settings)

    def broken() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker._engine, "_step", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            run(worker, shard_of(0, *PROMPTS))


def test_the_ledger_says_stop_when_all_workers_together_spent_the_budget() -> None:
    ledger = Ledger(token_budget=100)
    assert ledger.report("a", 1, 60).stop_reason == ""
    assert ledger.report("a", 2, 70).stop_reason == ""
    totals = ledger.report("b", 1, 30)
    assert (totals.answers, totals.tokens, totals.stop_reason) == (3, 100, "token budget spent")
