"""Rollouts as training data: samples, the draft vocabulary of a corpus, and an order that is a function of the step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pyarrow import ArrowException
from torch import Tensor

from tierspec.errors import ArtifactError, SettingError
from tierspec.sampling import RowSampling

_COLUMNS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("temperature", pa.float64()),
        ("target", pa.string()),
        ("template_hash", pa.string()),
    ]
)
_SAMPLED = pa.schema([("top_p", pa.float64()), ("top_k", pa.int64()), ("seed", pa.int64())])
_BUCKET_STEPS = 16


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's response; the response is what is supervised. `greedy`: decoded at temperature 0;
    `sampling`: how it was decoded, None if the rollouts do not say."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    greedy: bool = False
    sampling: RowSampling | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids

    @property
    def first_anchor(self) -> int:
        """The first row whose first draft is a response token: the prompt's last."""
        return len(self.prompt_ids) - 1

    @property
    def num_anchors(self) -> int:
        """Rows that have at least one supervised draft position: row p drafts tokens p + 2 and on."""
        return max(0, len(self.response_ids) - 1)


@dataclass(frozen=True)
class Rollouts:
    """Samples of one rollout directory. `cut`: samples shortened to the length limit; `dropped`: too short to train on.
    `target` and `template_hash`: whose answers they are."""

    samples: tuple[Sample, ...]
    cut: int
    dropped: int
    target: str
    template_hash: str

    @property
    def response_tokens(self) -> int:
        """Supervised tokens in all."""
        return sum(len(sample.response_ids) for sample in self.samples)


def read_rollouts(path: Path, max_length: int, target: str = "", template_hash: str = "") -> Rollouts:
    """All Parquet files under `path` (or the one file it is), in the order of their names.

    Responses are cut so that a sample has at most `max_length` tokens; a sample without two response tokens is dropped.
    `target` and `template_hash`: whose answers they must be, if given.

    Raises:
        ArtifactError: nothing there, a broken file, a missing or malformed column, or answers of different targets or
            templates.
        SettingError: no sample is left; answers of another target or chat template.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ArtifactError(f"no rollouts in {path}: run jobs.rollout first")
    samples: list[Sample] = []
    origins: set[tuple[str, str]] = set()
    cut = dropped = 0
    for file in files:
        for row in _rows(file):
            origins.add((row["target"], row["template_hash"]))
            prompt, response = tuple(row["prompt_ids"]), tuple(row["response_ids"])
            kept = response[: max(0, max_length - len(prompt))]
            if not prompt or len(kept) < 2:
                dropped += 1
                continue
            cut += len(kept) < len(response)
            greedy = row["temperature"] == 0.0
            samples.append(Sample(row["sample_id"], prompt, kept, greedy, _sampling(row)))
    if len(origins) > 1:
        raise ArtifactError(f"{path} holds rollouts of several targets or chat templates: {sorted(origins)}")
    if not samples:
        raise SettingError(
            f"training.max_length is {max_length}: none of the {dropped} rollouts in {path} has two response tokens "
            "within it"
        )
    of_target, with_template = origins.pop()
    if target and of_target != target:
        raise SettingError(f"target.source is {target}, but the rollouts in {path} are answers of {of_target}")
    if template_hash and with_template != template_hash:
        raise SettingError(f"target.source: the rollouts in {path} were made with another chat template")
    return Rollouts(tuple(samples), cut, dropped, of_target, with_template)


def _sampling(row: dict) -> RowSampling | None:
    if not all(name in row for name in _SAMPLED.names):
        return None
    return RowSampling(row["temperature"], row["top_k"], row["top_p"], row["seed"])


def _rows(file: Path) -> Iterable[dict]:
    try:
        there = pq.read_schema(file).names
        missing = [name for name in _COLUMNS.names if name not in there]
        if missing:
            raise ArtifactError(f"{file} is not a rollout file: no column {missing[0]}")
        columns = pa.unify_schemas([_COLUMNS, pa.schema([field for field in _SAMPLED if field.name in there])])
        table = pq.read_table(file, columns=columns.names).cast(columns)
    except (OSError, ArrowException) as error:
        raise ArtifactError(f"{file} is not a rollout file: {str(error).splitlines()[0]}") from None
    for name, column in zip(table.column_names, table.columns, strict=True):
        ids = pc.list_flatten(column) if pa.types.is_list(column.type) else column
        if column.null_count or ids.null_count:
            raise ArtifactError(f"{file} is not a rollout file: {name} has a null")
    return table.to_pylist()


def check_token_ids(samples: Iterable[Sample], vocab_size: int) -> None:
    """Raises ArtifactError unless every token id is one of the target's."""
    for sample in samples:
        ids = sample.token_ids
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab_size:
                raise ArtifactError(
                    f"rollout {sample.sample_id} holds token id {token}, but the target has {vocab_size} tokens"
                )


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Tensor:
    """How often each target token is supervised: int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(torch.tensor(sample.response_ids), minlength=vocab_size)
    return counts


class DataOrder:
    """Which samples an optimizer step trains on, as a pure function of (seed, step): resuming needs no state.

    Every epoch is a new permutation. Samples of similar length meet in one step: blocks of 16 steps are sorted by
    length, and the steps shuffled again. An epoch whose last step is not full is completed from its own beginning.
    """

    def __init__(self, lengths: Sequence[int], samples_per_step: int, seed: int) -> None:
        self._lengths = np.asarray(lengths)
        self._per_step = samples_per_step
        self._seed = seed
        self.steps_per_epoch = -(-len(lengths) // samples_per_step)
        self._epoch, self._steps = -1, np.empty((0, samples_per_step), dtype=np.int64)

    def samples(self, step: int) -> list[int]:
        """Sample numbers of the optimizer step `step` (0-based, over all epochs), similar lengths side by side."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, self._permutation(epoch)
        return self._steps[within].tolist()

    def _permutation(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._lengths))
        order = np.resize(order, self.steps_per_epoch * self._per_step)
        block = self._per_step * _BUCKET_STEPS
        for start in range(0, len(order), block):
            part = order[start : start + block]
            order[start : start + block] = part[np.argsort(self._lengths[part], kind="stable")]
        steps = order.reshape(self.steps_per_epoch, self._per_step)
        return steps[rng.permutation(self.steps_per_epoch)]


def sample_anchors(sample: Sample, count: int, seed: Sequence[int]) -> Tensor:
    """Up to `count` rows to unroll, uniform without replacement among those with a supervised draft: int64, rising."""
    rng = np.random.default_rng(tuple(seed))
    chosen = rng.choice(sample.num_anchors, size=min(count, sample.num_anchors), replace=False)
    return torch.from_numpy(np.sort(chosen) + sample.first_anchor)
