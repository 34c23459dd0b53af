"""Shards of prompts through a pool of rollout actors, and back to the disk of the driver as each is finished."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data import ActorPoolStrategy, DataContext

from pipelines.cluster import named_address, worker_gpus
from pipelines.prompts.prompt import Prompt
from pipelines.rollouts.directory import RolloutDirectory
from pipelines.rollouts.ledger import BUDGET_SPENT, STOPPED, Totals, watched_ledger
from pipelines.rollouts.plan import RolloutJob
from pipelines.rollouts.schema import write_shard
from pipelines.rollouts.worker import RolloutWorker
from tierspec.config import Settings


def run_shards(
    directory: RolloutDirectory,
    shards: Mapping[int, Sequence[Prompt]],
    settings: Settings,
    job: RolloutJob,
    *,
    label: str,
    token_budget: int = 0,
    heldout: Sequence[Prompt] = (),
    stop: Callable[[], bool],
) -> Totals:
    """Answer those of `shards` that are not finished yet; each is written when its last answer is there.

    Adds to `directory.finished`. Ends early, with whole shards, when `stop()` or when the finished shards hold
    `token_budget` response tokens (0: no limit); answers that are under way by then are finished too. No follow-up turn
    overlaps a prompt of `heldout`.

    Returns: what was done now, and why it ended early if it did.

    Raises:
        SettingError: this machine has fewer GPUs than `rollout.workers`.
    """
    there = [report for number, report in directory.finished.items() if number in shards]
    waiting = {number: prompts for number, prompts in shards.items() if number not in directory.finished}
    budget_left = token_budget - sum(report.tokens for report in there)
    if token_budget and budget_left <= 0:
        return Totals(stop_reason=BUDGET_SPENT)
    if not waiting:
        return Totals()
    if stop():
        return Totals(stop_reason=STOPPED)
    resources = ray.cluster_resources()
    gpus = worker_gpus(settings, "rollout.workers", settings.rollout.workers, resources.get("GPU", 0.0))
    with watched_ledger(
        budget_left if token_budget else 0,
        asked=sum(map(job.asks, shards.values())),
        finished=sum(report.asked for report in there),
        label=label,
        stop=stop,
    ) as ledger:
        rollouts = _dataset(waiting).map_batches(
            RolloutWorker,
            fn_constructor_args=(settings, job, ledger, heldout),
            batch_size=None,
            batch_format="pyarrow",
            compute=_pool(settings, len(waiting)),
            num_cpus=worker_cpus(settings, resources.get("CPU", 1.0)),
            num_gpus=gpus,
        )
        for batch in rollouts.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            table = cast(pa.Table, batch)
            numbers = table.column("shard")
            for number in numbers.unique().to_pylist():
                outcomes = table.filter(pc.equal(numbers, number)).drop_columns("shard")
                directory.finished[number] = write_shard(directory.path, directory.fingerprint, number, outcomes)
        return cast(Totals, ray.get(ledger.totals.remote()))


def worker_cpus(settings: Settings, cluster_cpus: float) -> float:
    """Logical CPUs that one rollout actor reserves.

    On a cluster that is its threads; on a local Ray all actors together leave one logical CPU to Ray Data.
    """
    wanted = float(settings.rollout.threads or 1)
    if named_address(settings):
        return wanted
    share = max(cluster_cpus - 1, 0.5) / settings.rollout.workers
    return min(wanted, math.floor(share * 100) / 100)


def _pool(settings: Settings, shards: int) -> ActorPoolStrategy:
    """As many shards in work per actor as keep its slots full while old shards wait for their longest answers.

    An answer takes up to about four times the mean length, so the prompts of four slots' worth of shards suffice.
    """
    rollout = settings.rollout
    in_work = math.ceil(4 * rollout.slots / rollout.shard_size) + 2
    return ActorPoolStrategy(
        size=min(rollout.workers, shards), max_tasks_in_flight_per_actor=in_work, max_concurrent_calls_per_actor=in_work
    )


def _dataset(shards: Mapping[int, Sequence[Prompt]]) -> ray.data.Dataset:
    """One block per shard, so that one call of the worker is one shard."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it warns that its bars are off
    return ray.data.from_arrow(
        [
            pa.table({"shard": [number] * len(prompts), "prompt": [json.dumps(prompt.to_json()) for prompt in prompts]})
            for number, prompts in shards.items()
        ]
    )
