"""What a training run trains on, read and checked before anything starts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.rollouts.directory import MANIFEST
from pipelines.training.identity import refuse_changes, training_identity
from pipelines.training.trackers import check_trackers
from tierspec.artifacts import read_object, run_directory
from tierspec.config import Settings
from tierspec.errors import SettingError
from tierspec.training.acceptance import check_sampling_known
from tierspec.training.data import Rollouts, Sample, read_rollouts


@dataclass(frozen=True)
class TrainingPlan:
    """What a run trains on and where it goes, checked. `rollouts` is the whole corpus, `samples` what is trained on;
    `heldout_source` says where the held-out samples come from."""

    rollouts: Rollouts
    samples: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    heldout_source: str
    output: Path
    identity: dict[str, Any]

    @property
    def state(self) -> Path:
        """Folder of the training state."""
        return self.output.parent / "training"


def plan_training(
    settings: Settings, *, output: Path, rollouts: Path | None = None, heldout: Path | None = None
) -> TrainingPlan:
    """Read and check everything that a run needs, and write nothing; arguments as in `train_drafter`.

    Raises:
        SettingError: bad rollouts, or of another target; rollouts that do not say what the objective needs; held-out
            rollouts that are all too short; a training state of other settings.
    """
    check_trackers(settings)
    directory = rollouts or run_directory(settings, "rollouts") / "train"
    corpus = read_rollouts(directory, settings.training.max_length, settings.target.source)
    if heldout is None and any((directory.parent / "heldout").glob("*.parquet")):
        heldout = directory.parent / "heldout"
    if not _choices_are_known(directory, settings):
        corpus = replace(corpus, samples=tuple(replace(sample, greedy=False) for sample in corpus.samples))
    samples, held_out, source = _split(corpus, heldout, settings)
    if settings.training.objective.verification == "keyed":
        check_sampling_known((*samples, *held_out))
    identity = training_identity(settings, samples)
    plan = TrainingPlan(corpus, samples, held_out, source, output, identity)
    if not settings.training.overwrite:
        refuse_changes(plan.state, identity)
    return plan


def _choices_are_known(rollouts: Path, settings: Settings) -> bool:
    """Whether greedy rollouts hold, token for token, what the target of `settings` would choose in training."""
    manifest, target = rollouts / MANIFEST, settings.target
    if not manifest.is_file() or target.device != "cpu" or target.numerics == "fast":
        return False
    made_with = read_object(manifest).get("identity")
    wanted = {"target.dtype": target.dtype, "target.device": "cpu"}
    return (
        isinstance(made_with, dict)
        and all(made_with.get(name) == value for name, value in wanted.items())
        and made_with.get("target.numerics") in ("auto", "invariant")
    )


def _split(
    corpus: Rollouts, heldout: Path | None, settings: Settings
) -> tuple[tuple[Sample, ...], tuple[Sample, ...], str]:
    """Training samples, held-out samples, and where the latter came from."""
    count = settings.training.heldout_prompts
    if not count:
        return corpus.samples, (), ""
    if heldout is not None:
        found = walkable(read_heldout(heldout, corpus, settings), settings, str(heldout))
        step = max(1, len(found) // count)
        return corpus.samples, found[::step][:count], str(heldout)
    count = min(count, len(corpus.samples) // 2)
    ranked = sorted(
        walkable(corpus.samples, settings, "the rollouts"), key=lambda s: hashlib.sha256(s.sample_id.encode()).digest()
    )
    held = {sample.sample_id for sample in ranked[:count]}
    kept = tuple(sample for sample in corpus.samples if sample.sample_id not in held)
    return (
        kept,
        tuple(sample for sample in corpus.samples if sample.sample_id in held),
        "split of the training rollouts",
    )


def read_heldout(directory: Path, corpus: Rollouts, settings: Settings) -> tuple[Sample, ...]:
    """Held-out answers of the target that the corpus is of, with the same chat template."""
    return read_rollouts(directory, settings.training.max_length, corpus.target, corpus.template_hash).samples


def walkable(samples: Sequence[Sample], settings: Settings, source: str) -> tuple[Sample, ...]:
    """The samples along which a drafter can be walked: those with a whole round of drafts.

    Raises:
        SettingError: there is none.
    """
    depth = settings.training.depth
    if long_enough := tuple(sample for sample in samples if len(sample.response_ids) > depth):
        return long_enough
    raise SettingError(
        f"training.heldout_prompts: no answer in {source} has more than training.depth = {depth} tokens; make longer "
        "ones, or set it to 0"
    )
