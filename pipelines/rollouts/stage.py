"""The rollout stage: prompt sets in, the target's answers out, and every answer that was asked for accounted for."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.cluster import ray_session
from pipelines.prompts.diversity import diversity
from pipelines.prompts.mixing import mixed
from pipelines.prompts.overlap import drop_repeats, split_contaminated
from pipelines.prompts.prompt import Prompt
from pipelines.prompts.reading import read_prompt_sets, read_prompts, spread
from pipelines.prompts.self_written import SOURCE, TurnSelection, open_user_turn
from pipelines.rollouts.directory import RolloutDirectory, refuse_changes
from pipelines.rollouts.ledger import STOPPED
from pipelines.rollouts.plan import (
    RolloutJob,
    Split,
    TargetCard,
    answering_job,
    describe_target,
    digest_of,
    identity,
    in_shards,
    shuffled,
    split_identity,
    turn_id,
    writing_job,
)
from pipelines.rollouts.pool import run_shards
from pipelines.rollouts.schema import shard_path
from pipelines.rollouts.worker import TOO_LONG
from tierspec.artifacts import atomic_write_json, atomic_write_text, require_disk
from tierspec.config import Settings
from tierspec.errors import SettingError
from tierspec.threads import thread_count

Stop = Callable[[], bool]
PROMPTS, RESULT, WRITTEN = "prompts.jsonl", "result.json", "self_written"
_BYTES_PER_TOKEN = 8
_SPARE_BYTES = 64 * 2**20
_ATTEMPTS_PER_TURN = 4.0
_FIRST_ATTEMPTS_PER_TURN = 1.3
_LISTED = 100


@dataclass
class PromptSet:
    """Prompts to answer, and `counts` of what became of those that were read."""

    prompts: list[Prompt]
    heldout: list[Prompt] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


def read_prompt_set(settings: Settings, split: Split) -> PromptSet:
    """Read the prompts of a split; training prompts without repeats, without those that overlap a held-out prompt, in
    mixed order and at most `prompts.limit`.

    Raises:
        SettingError: see `read_prompts`.
    """
    heldout = drop_repeats(read_prompts(settings.prompts.heldout, "prompts.heldout"))
    if split == "heldout":
        chosen = spread(heldout, settings.rollout.heldout_prompts)
        return PromptSet(chosen, counts={"read": len(heldout), "over_limit": len(heldout) - len(chosen)})
    sets = read_prompt_sets(settings.prompts.train, "prompts.train")
    read = [prompt for members in sets for prompt in members]
    distinct = drop_repeats(read)
    clean, contaminated = split_contaminated(distinct, heldout)
    usable = {prompt.sample_id for prompt in clean}
    sets = [[prompt for prompt in members if prompt.sample_id in usable] for members in sets]
    shuffle = partial(shuffled, run_seed=settings.run.seed)
    chosen = mixed(sets, settings.prompts.weights, settings.prompts.limit, shuffle)
    counts = {
        "read": len(read),
        "repeated": len(read) - len(distinct),
        "contaminated": len(contaminated),
        "over_limit": len(clean) - len(chosen),
    }
    return PromptSet(chosen, heldout, counts)


def check_rollouts(settings: Settings, *, split: Split, output: Path) -> tuple[PromptSet, TargetCard]:
    """Whatever can be wrong before anything is written.

    Raises:
        SettingError: bad prompts, an unusable target, too little disk, or rollouts of other settings in `output`.
    """
    prompt_set = read_prompt_set(settings, split)
    card = describe_target(settings.target.source)
    if not settings.rollout.overwrite:
        refuse_changes(output, split_identity(settings, split, card))
    job = answering_job(settings, split)
    for setting in ("self_written", "follow_ups"):
        if split == "train" and getattr(settings.prompts, setting):
            open_user_turn(card.tokenizer, (), setting=f"prompts.{setting}")
    turns = job.asks(prompt_set.prompts) + settings.prompts.self_written * (2 + job.follow_ups)
    text = sum(len(turn) for prompt in prompt_set.prompts for turn in prompt.turns)
    tokens = turns * settings.rollout.max_new_tokens
    require_disk(output, tokens * _BYTES_PER_TOKEN + 2 * text + _SPARE_BYTES, "run.root", what="jobs.rollout")
    return prompt_set, card


def make_rollouts(settings: Settings, *, split: Split, output: Path, stop: Stop = lambda: False) -> dict[str, Any]:
    """Let the target answer the prompts of a split, into `output`; what is there already is kept.

    Writes `shard-*.parquet` (`schema.SCHEMA`), `prompts.jsonl`, `manifest.json` and `result.json`, whose content is
    returned. `asked`, `done`, `failed` and `skipped` count answers, one per user turn, those the target wrote included;
    done + failed + skipped = asked.

    Args:
        stop: polled; once true, the shards under way are finished and the others skipped.

    Raises:
        SettingError: see `check_rollouts`.
        KeyboardInterrupt: `stop` while the target still writes its own prompts; the next run goes on from there.
    """
    prompt_set, card = check_rollouts(settings, split=split, output=output)
    job = answering_job(settings, split)
    with ray_session(settings):
        began = time.monotonic()
        if split == "train" and settings.prompts.self_written:
            _add_self_written(prompt_set, settings, card, output, stop)
        if split == "train" and not prompt_set.prompts:
            raise SettingError(f"prompts.train: no prompt is left to answer ({json.dumps(prompt_set.counts)})")
        known_as = split_identity(settings, split, card) | {f"prompts.{split}": digest_of(prompt_set.prompts)}
        directory = RolloutDirectory(output, known_as, overwrite=settings.rollout.overwrite)
        rows = (json.dumps(prompt.to_json(), ensure_ascii=False) + "\n" for prompt in prompt_set.prompts)
        atomic_write_text(output / PROMPTS, "".join(rows))
        totals = run_shards(
            directory,
            dict(enumerate(in_shards(prompt_set.prompts, settings.rollout.shard_size))),
            settings,
            job,
            label=f"rollouts ({split})",
            token_budget=settings.rollout.token_budget if split == "train" else 0,
            heldout=prompt_set.heldout,
            stop=stop,
        )
    result = _account(prompt_set, job, directory, totals.stop_reason or STOPPED, settings.rollout.shard_size)
    result |= {
        "split": split,
        "output": str(output),
        "target": card.source,
        "fingerprint": directory.fingerprint,
        "ended_early": totals.stop_reason,
        "seconds": round(time.monotonic() - began, 3),
        "tokens_per_s": round(totals.tokens / totals.seconds, 1) if totals.seconds else None,
        "workers": settings.rollout.workers,
        "threads": thread_count(settings.rollout.threads, processes=settings.rollout.workers),
    }
    atomic_write_json(output / RESULT, result)
    return result


def _add_self_written(prompt_set: PromptSet, settings: Settings, card: TargetCard, output: Path, stop: Stop) -> None:
    """Let the target write user turns, as rollouts of their own in `output`/self_written, until enough are usable."""
    job, size, wanted = writing_job(settings), settings.rollout.shard_size, settings.prompts.self_written
    directory = RolloutDirectory(output / WRITTEN, identity(settings, job, card), overwrite=settings.rollout.overwrite)
    selection, shards = TurnSelection(wanted), 0
    while not selection.full and shards * size < _ATTEMPTS_PER_TURN * wanted:
        first, attempts = shards, _FIRST_ATTEMPTS_PER_TURN * (wanted - len(selection.prompts))
        shards += max(1, round(attempts / size))
        numbered = {
            shard: [Prompt(f"{SOURCE}-{shard * size + k:06d}", SOURCE, ("-",)) for k in range(size)]
            for shard in range(first, shards)
        }
        run_shards(directory, numbered, settings, job, label="self-written prompts", stop=stop)
        if stop():
            raise KeyboardInterrupt
        for shard in numbered:
            rows = pq.read_table(shard_path(directory.path, shard)).to_pylist()
            texts = card.tokenizer.batch_decode([row["response_ids"] for row in rows])
            selection.offer(
                (text, row["response_ids"], row["finish_reason"]) for text, row in zip(texts, rows, strict=True)
            )
    clean, contaminated = split_contaminated(selection.prompts, prompt_set.heldout)
    prompt_set.prompts = shuffled(drop_repeats(prompt_set.prompts + clean), settings.run.seed)
    prompt_set.counts["self_written"] = selection.counts() | {"contaminated": len(contaminated)}


def _account(
    prompt_set: PromptSet, job: RolloutJob, directory: RolloutDirectory, not_begun: str, shard_size: int
) -> dict[str, Any]:
    """Every answer asked for is done, failed or skipped."""
    reports = directory.finished
    missing = [
        (turn_id(prompt.sample_id, turn), not_begun)
        for shard, prompts in enumerate(in_shards(prompt_set.prompts, shard_size))
        if shard not in reports
        for prompt in prompts
        for turn in range(job.asks([prompt]))
    ]
    failed = [entry for shard in sorted(reports) for entry in reports[shard].failed]
    skipped = [entry for shard in sorted(reports) for entry in reports[shard].skipped]
    return {
        "asked": job.asks(prompt_set.prompts),
        "done": sum(report.done for report in reports.values()),
        "failed": len(failed),
        "skipped": len(skipped) + len(missing),
        "tokens": sum(report.tokens for report in reports.values()),
        "skipped_by_reason": dict(Counter(reason.partition(" (")[0] for _, reason in skipped + missing)),
        "failed_samples": [list(entry) for entry in failed[:_LISTED]],
        "skipped_samples": [list(entry) for entry in skipped if entry[1].startswith(TOO_LONG)][:_LISTED],
        "prompts": prompt_set.counts | {"used": len(prompt_set.prompts)},
        "diversity": diversity(prompt_set.prompts),
    }
