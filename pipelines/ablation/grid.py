"""The runs of an ablation: every variant with every seed, on the same rollouts and held-out samples."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.training import plan_training, read_heldout, walkable
from pipelines.training.identity import training_identity
from tierspec.artifacts import read_object, run_directory
from tierspec.config import Settings
from tierspec.errors import ArtifactError, SettingError
from tierspec.paths import user_path
from tierspec.training.data import Sample, read_rollouts

_FREE = {"training", "drafter"}
_SHARED = (  # what makes runs comparable: data, their order and steps, and what chooses a checkpoint
    *("max_minutes", "max_steps", "epochs", "batch_sequences", "accumulation", "workers", "max_length"),
    *("heldout_prompts", "evaluate_every"),
)


@dataclass(frozen=True)
class Trial:
    """One run. `identity`: all that its result depends on."""

    variant: str
    seed: int
    settings: Settings
    directory: Path
    result_path: Path
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    def result(self) -> dict[str, Any] | None:
        """What is known of a finished run; None if it has not finished. Settings that did not exist when it was made
        had their defaults.

        Raises:
            SettingError: the result there is of other settings, rollouts or held-out samples.
        """
        if not self.result_path.exists():
            return None
        found = read_object(self.result_path)
        made_with = found.get("identity")
        if not isinstance(made_with, dict):
            raise ArtifactError(f"{self.result_path} is not the result of an ablation run")
        defaults = training_identity(Settings(), ())
        for name, value in self.identity.items():
            if made_with.get(name, defaults.get(name)) != value:
                raise SettingError(
                    f"ablation.results: {self.result_path} was made with another {name}; remove it, or name another "
                    "folder"
                )
        return found


@dataclass(frozen=True)
class AblationPlan:
    """The runs, in the order in which they are made: seed by seed, so that early results are pairs."""

    trials: tuple[Trial, ...]
    rollouts: Path
    heldout: tuple[Sample, ...]


def plan_ablation(settings: Settings, output: Path) -> AblationPlan:
    """Reads and checks everything, and writes nothing.

    Raises:
        SettingError: a variant changes more than training and drafter, or is not valid; a budget in minutes; no
            held-out rollouts; rollouts that do not fit.
    """
    if settings.training.max_minutes:
        raise SettingError(
            f"training.max_minutes is {settings.training.max_minutes:g}, which gives every run another number of "
            "steps: set it to 0 and training.max_steps"
        )
    rollouts = run_directory(settings, "rollouts") / "train"
    folder = rollouts.parent / "heldout"
    if not any(folder.glob("*.parquet")):
        raise SettingError(f"no held-out rollouts in {folder}: run jobs.rollout first")
    corpus = read_rollouts(rollouts, settings.training.max_length, settings.target.source)
    heldout = walkable(read_heldout(folder, corpus, settings), settings, str(folder))
    digest = hashlib.sha256(json.dumps([[s.sample_id, s.token_ids] for s in heldout]).encode()).hexdigest()
    results = output / "results"
    if settings.ablation.results:
        results = user_path(settings.ablation.results, "ablation.results")
    trials = []
    for seed in settings.ablation.seeds:
        for variant in settings.ablation.variants:
            of_trial = _settings_of(settings, variant, seed)
            directory = output / f"{variant}-seed{seed}"
            plan = plan_training(of_trial, output=directory / "drafter", rollouts=rollouts)
            training = of_trial.training
            identity = plan.identity | {
                "heldout": digest,
                "training.epochs": training.epochs,
                "training.max_steps": training.max_steps,
            }
            path = results / f"{variant}-seed{seed}.json"
            trials.append(Trial(variant, seed, of_trial, directory, path, json.loads(json.dumps(identity))))
    return AblationPlan(tuple(trials), rollouts, heldout)


def _settings_of(settings: Settings, variant: str, seed: int) -> Settings:
    try:
        changed = settings.override(*settings.ablation.variants[variant])
    except SettingError as error:
        raise SettingError(f"ablation.variants.{variant}: {error}") from error
    before, after = settings.model_dump(), changed.model_dump()
    others = [group for group in before if group not in _FREE and before[group] != after[group]]
    if others:
        raise SettingError(
            f"ablation.variants.{variant} changes {others[0]}: variants may differ in training and drafter only"
        )
    for name in _SHARED:
        if getattr(settings.training, name) != getattr(changed.training, name):
            raise SettingError(
                f"ablation.variants.{variant} changes training.{name}, which all runs share; set it for the ablation"
            )
    return changed.override(f"run.seed={seed}", "training.heldout_prompts=0", "training.evaluate_every=0")
