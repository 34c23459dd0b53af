"""The losslessness matrix: whatever drafts, batches and placements do, the text is that of plain decoding.

Each cell of the matrix decodes the held-out prompts through the served engine (asyncio driver, channels, tiers) and
compares, token for token, with plain autoregressive decoding by the library, which the cells of one prompt at a time
without drafts must equal as well. Only invariant numerics promise that in bf16, so the target runs with them.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.channels import ActorChannel, InprocChannel
from actors.tiers import DrafterActor, FullVerifierActor, Models, TierFacts
from pipelines.cluster import ray_session
from pipelines.prompts import read_prompts, spread
from tests.evidence.sources import sources_sha256
from tierspec.artifacts import atomic_write_json, sha256_of
from tierspec.config import Settings, load_settings
from tierspec.decoding import (
    AsyncDriver,
    Channel,
    DraftOptions,
    Engine,
    EngineLimits,
    LocalCell,
    SamplingParams,
    Sequence,
)
from tierspec.evaluation.comparison import first_difference
from tierspec.evaluation.environment import describe_environment
from tierspec.evaluation.top2_gap import Top2Gap
from tierspec.threads import usable_cores

DTYPES = ("float32", "bfloat16")
PLACEMENTS = ("colocated", "separate")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
SOURCES: dict[str, Any] = {"autoregressive": "none", "suffix": "suffix", "eagle3": "neural"}
BATCHES = (1, 8)
FIRST_SEED = 1000
MAX_DRAFT_TOKENS = 10
PREFILL_TOKENS = 512
ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class MatrixCell:
    """One configuration. `name` is its key in the result."""

    dtype: str
    placement: str
    sampling: str
    method: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.dtype}/{self.placement}/{self.sampling}/{self.method}/batch-{self.batch}"


CELLS = [MatrixCell(*c) for c in itertools.product(DTYPES, PLACEMENTS, SAMPLINGS, SOURCES, BATCHES)]


@dataclass(frozen=True)
class Tiers:
    """Both tiers of one placement, ready, and the limits they name."""

    channels: dict[Any, Channel]
    facts: TierFacts


def run_matrix(
    drafter: Path,
    output: Path,
    *,
    target: str = "embedded:smollm2-135m",
    prompts: int = 50,
    new_tokens: int = 128,
    cells: Items[MatrixCell] = tuple(CELLS),
    fresh: bool = False,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs the cells that `output` does not hold yet, writing it after each; the result, `passed` if all so far are
    identical, `complete` once the whole matrix is there.

    A file of other sources, another drafter or size is started anew.
    """
    identity: dict[str, Any] = {"sources_sha256": sources_sha256()}
    identity |= {"target": target, "drafter_sha256": sha256_of(drafter / "model.safetensors")}
    identity |= {"prompts": prompts, "new_tokens": new_tokens, "samplings": SAMPLINGS, "first_seed": FIRST_SEED}
    if fresh:
        output.unlink(missing_ok=True)
    result = _opened(output, identity)
    missing = [cell for cell in cells if cell.name not in result["cells"]]
    for dtype, of_dtype in itertools.groupby(missing, lambda cell: cell.dtype):
        models = Models(_settings(target, dtype, "colocated"), str(drafter))
        reference = _Reference(models, prompts, new_tokens)
        for placement, group in itertools.groupby(of_dtype, lambda cell: cell.placement):
            with _tiers(_settings(target, dtype, placement), models, drafter) as tiers:
                for cell in group:
                    entry = _run_cell(cell, tiers, reference)
                    result = _opened(output, identity)  # another process may have added other cells meanwhile
                    result["cells"][cell.name] = entry
                    result["passed"] = all(e["identical"] == e["prompts"] for e in result["cells"].values())
                    result["complete"] = len(result["cells"]) == len(CELLS)
                    atomic_write_json(output, result)
                    log(f"{cell.name}: {entry['identical']}/{entry['prompts']} same, {entry['tokens_per_s']} tokens/s")
    return result


def _settings(target: str, dtype: str, placement: str) -> Settings:
    overrides = [f"target.source={target}", f"target.dtype={dtype}", "target.numerics=invariant"]
    return load_settings(None, [*overrides, f"serve.placement={placement}"])


class _Reference:
    """Prompts, and what plain decoding answers to each of them."""

    def __init__(self, models: Models, prompts: int, new_tokens: int) -> None:
        read = read_prompts(["builtin:heldout"], "prompts.heldout")
        chosen = spread(read, prompts)
        self.ids = [prompt.sample_id for prompt in chosen]
        self.prompts = [models.target.encode_chat([{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]
        self.gap = Top2Gap(models.target.decoder)
        self._cell = LocalCell(models.target, max_running=max(BATCHES))
        self._new_tokens = new_tokens
        self._answers: dict[str, list[list[int]]] = {}

    def params(self, sampling: str) -> list[SamplingParams]:
        return [
            SamplingParams(self._new_tokens, seed=FIRST_SEED + index, **SAMPLINGS[sampling])
            for index in range(len(self.prompts))
        ]

    def answers(self, sampling: str) -> list[list[int]]:
        if sampling not in self._answers:
            found = self._cell.generate(self.prompts, self.params(sampling))
            self._answers[sampling] = [answer.token_ids for answer in found]
        return self._answers[sampling]


def _run_cell(cell: MatrixCell, tiers: Tiers, reference: _Reference) -> dict[str, Any]:
    expected = reference.answers(cell.sampling)
    began = time.perf_counter()
    sequences = asyncio.run(_decode(cell, tiers, reference.prompts, reference.params(cell.sampling)))
    seconds = time.perf_counter() - began
    outputs = [sequence.output_ids for sequence in sequences]
    differing = []
    for index, (wanted, found) in enumerate(zip(expected, outputs, strict=True)):
        position = first_difference(wanted, found)
        if position is not None:
            gap = reference.gap(reference.prompts[index] + wanted[:position])
            differing.append({"prompt_id": reference.ids[index], "position": position, "top2_gap": gap})
    rounds = sum(sequence.stats.rounds for sequence in sequences)
    return {
        "identical": len(outputs) - len(differing),
        "prompts": len(outputs),
        "tokens": sum(map(len, outputs)),
        "tokens_per_s": round(sum(map(len, outputs)) / seconds, 1),
        "accept_len": round(1 + sum(sequence.stats.accepted for sequence in sequences) / max(rounds, 1), 4),
        "differences": differing,
    }


async def _decode(
    cell: MatrixCell, tiers: Tiers, prompts: Items[list[int]], params: Items[SamplingParams]
) -> list[Sequence]:
    """All prompts through one engine, `cell.batch` at a time."""
    facts = tiers.facts
    longest = max(len(ids) + p.max_new_tokens for ids, p in zip(prompts, params, strict=True))
    limits = EngineLimits(
        max_running=cell.batch,
        token_budget=cell.batch * (longest + MAX_DRAFT_TOKENS + 64),
        prefill_tokens=PREFILL_TOKENS,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        max_context=facts.max_context,
        vocab_size=facts.vocab_size,
    )
    driver = AsyncDriver(Engine(limits, drafter=facts.drafter, eos_ids=facts.eos_ids), tiers.channels)
    running = asyncio.create_task(driver.run())
    draft = DraftOptions(source=SOURCES[cell.method])
    sequences = [
        Sequence(f"{cell.name}#{index}", ids, sampling, draft, wants_text=False)
        for index, (ids, sampling) in enumerate(zip(prompts, params, strict=True))
    ]

    async def follow(sequence: Sequence) -> None:
        async with await driver.submit(sequence) as stream:
            async for _ in stream:
                pass

    try:
        await asyncio.gather(*(follow(sequence) for sequence in sequences))
    finally:
        driver.close()
        await running
    return sequences


@contextmanager
def _tiers(settings: Settings, models: Models, drafter: Path) -> Iterator[Tiers]:
    threads = usable_cores()
    if settings.serve.placement == "colocated":
        channels: dict[Any, InprocChannel | ActorChannel] = {
            "verifier": InprocChannel("verifier", models.verifier_tier(), threads),
            "drafter": InprocChannel("drafter", models.drafter_tier(), threads),
        }
        yield Tiers(dict(channels), TierFacts.of(models, threads))
        for channel in channels.values():
            channel.close()
        return
    with ray_session(settings):
        kinds: dict[Any, Any] = {"verifier": ray.remote(FullVerifierActor), "drafter": ray.remote(DrafterActor)}
        actors = {
            tier: kind.options(num_cpus=0.5).remote(settings, str(drafter), threads) for tier, kind in kinds.items()
        }
        facts = ray.get([actor.ping.remote() for actor in actors.values()])
        channels = {tier: ActorChannel(tier, actor, ANSWER_TIMEOUT_S) for tier, actor in actors.items()}
        yield Tiers(dict(channels), facts[0])
        for channel in channels.values():
            channel.close()


def _opened(output: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """What `output` holds, if it is of the same sources and identity; else an empty result."""
    if output.is_file():
        found = json.loads(output.read_text(encoding="utf-8"))
        if all(found.get(key) == value for key, value in json.loads(json.dumps(identity)).items()):
            return dict(found)
    return describe_environment() | identity | {"passed": False, "cells": {}}
