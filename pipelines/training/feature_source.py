"""Where a training worker gets the target's features from: its own target, a folder, or a pool of actors."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext

from pipelines.cluster import named_address
from pipelines.training.engine import agree
from pipelines.training.identity import features_identity
from pipelines.training.job import WorkerJob
from tierspec.artifacts import require_disk
from tierspec.config import Settings
from tierspec.errors import SettingError
from tierspec.models import Target
from tierspec.models.loading import load_target
from tierspec.threads import use_threads
from tierspec.training.data import DataOrder, Sample
from tierspec.training.feature_store import FeatureStore, from_bytes, store_bytes, to_bytes
from tierspec.training.features import FeatureRequest, SequenceFeatures, TargetFeatures

_GB = 10**9


class FeatureSource(Protocol):
    """The features of the sequences of a micro-batch, asked for in the order of the steps."""

    def __call__(self, requests: Sequence[FeatureRequest]) -> list[SequenceFeatures]: ...


def request_of(number: int, sample: Sample) -> FeatureRequest:
    """What is asked about sample `number` of a run."""
    return FeatureRequest(number, sample.token_ids, sample.first_anchor, sample.greedy)


def micro_batch(order: DataOrder, settings: Settings, index: int, rank: int, world: int) -> tuple[int, list[int]]:
    """Of a rank's micro-batch `index`, counted over all steps: the place of its first sample in the step, and its
    samples' numbers."""
    training = settings.training
    step, micro = divmod(index, training.accumulation)
    first = (micro * world + rank) * training.batch_sequences
    return first, order.samples(step)[first : first + training.batch_sequences]


def inline_features(settings: Settings, target: Target, layers: Sequence[int]) -> TargetFeatures:
    """The worker's own target, which keeps what the memory allows from epoch to epoch."""
    training = settings.training
    return TargetFeatures(
        target.decoder,
        layers,
        max_length=training.max_length,
        cache_bytes=2**20 * training.feature_cache_mb if training.epochs > 1 and training.features == "inline" else 0,
        with_normaliser=training.objective.verification == "rejection",
    )


def cached_features(job: WorkerJob, target: Target, layers: Sequence[int], rank: int, world: int) -> FeatureStore:
    """The folder `features` of the run, filled by all ranks together where it is not yet.

    Raises:
        SettingError: it would be larger than `training.feature_disk_gb`, or than the disk.
    """
    settings, decoder = job.settings, target.decoder
    tokens = sum(len(sample.token_ids) for sample in job.samples)
    size = store_bytes(tokens, len(layers), decoder.config.hidden_size, decoder.dtype.itemsize)
    limit = settings.training.feature_disk_gb
    if size > limit * _GB:
        raise SettingError(
            f"training.features is cached: {tokens:,} tokens take {size / _GB:.1f} GB, more than "
            f"training.feature_disk_gb = {limit:g}; raise it to have them made"
        )
    store = FeatureStore(job.features, features_identity(settings, layers, target.template_hash, job.samples))
    if missing := [number for number in store.missing(len(job.samples)) if number % world == rank]:
        require_disk(job.state, size, "run.root", what="training.features")
        requests = [request_of(number, sample) for number, sample in enumerate(job.samples)]
        store.fill(inline_features(settings, target, layers), requests, missing)
    agree([0.0], decoder.device, world)  # all shards are there before anybody reads
    return store


class StreamedFeatures:
    """Features computed ahead of the steps by a pool of actors of this worker (Ray Data). Nothing touches the disk, and
    the pool waits when the steps do not keep up."""

    def __init__(self, job: WorkerJob, layers: Sequence[int], rank: int, world: int, steps: range) -> None:
        """`steps`: the optimizer steps that features will be asked for, in order."""
        training = job.settings.training
        count = len(steps) * training.accumulation
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        on_gpu = job.settings.target.device.startswith("cuda")
        cpus = float(training.feature_threads or 1) if named_address(job.settings) else 0.25
        blocks = min(count, 10_000)
        stream = ray.data.range(count, override_num_blocks=blocks).map_batches(
            FeatureActor,
            fn_constructor_args=(ray.put(job), tuple(layers), rank, world, steps.start),
            batch_size=1,
            compute=ActorPoolStrategy(size=training.feature_workers, max_tasks_in_flight_per_actor=2),
            num_cpus=cpus,
            num_gpus=1.0 if on_gpu else 0.0,
            resources={training.feature_node: 1.0} if training.feature_node else None,
        )
        self._rows: Iterator[dict[str, Any]] = iter(stream.iter_rows())

    def __call__(self, requests: Sequence[FeatureRequest]) -> list[SequenceFeatures]:
        """The next micro-batch of the stream. ArtifactError if it is not the one of `requests`."""
        return from_bytes(requests, next(self._rows)["features"])


class FeatureActor:
    """One target of the pool; its answers hold a micro-batch each."""

    def __init__(self, job: Any, layers: tuple[int, ...], rank: int, world: int, first_step: int) -> None:
        self._job: WorkerJob = ray.get(job) if isinstance(job, ray.ObjectRef) else job
        settings = self._job.settings
        training = settings.training
        use_threads(training.feature_threads, processes=training.feature_workers * world)
        place = settings.target
        target = load_target(place.source, dtype=place.dtype, device=place.device, numerics=place.numerics)
        self._features = inline_features(settings, target, layers)
        lengths = [len(sample.token_ids) for sample in self._job.samples]
        self._order = DataOrder(lengths, world * training.accumulation * training.batch_sequences, settings.run.seed)
        self._rank, self._world = rank, world
        self._first = first_step * training.accumulation

    def __call__(self, batch: dict[str, np.ndarray]) -> pa.Table:
        packed = []
        for index in batch["id"].tolist():
            _, numbers = micro_batch(self._order, self._job.settings, self._first + index, self._rank, self._world)
            requests = [request_of(number, self._job.samples[number]) for number in numbers]
            packed.append(to_bytes(requests, self._features(requests)))
        return pa.table({"features": pa.array(packed, pa.large_binary())})


def feature_source(
    job: WorkerJob, target: Target, layers: Sequence[int], rank: int, world: int, steps: range
) -> FeatureSource:
    """What `training.features` says, for the optimizer steps `steps`; all ranks call it together.

    Raises:
        SettingError: see `cached_features`.
    """
    match job.settings.training.features:
        case "inline":
            return inline_features(job.settings, target, layers)
        case "cached":
            return cached_features(job, target, layers, rank, world)
        case "streamed":
            return StreamedFeatures(job, layers, rank, world, steps)
