"""The ablation stage: trains what is missing, walks every drafter over the held-out samples, and compares.

Each run has a result file of its own, written when it ends; a run whose file is there is not made again. Several
commands may work on one ablation at the same time: a run belongs to the one that holds its lock.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipelines.ablation.grid import AblationPlan, Trial, plan_ablation
from pipelines.training import train_drafter
from pipelines.training.job import LOG
from pipelines.training.records import read_records
from tierspec.artifacts import atomic_write_json
from tierspec.config import Settings
from tierspec.drafters import load_drafter
from tierspec.evaluation.ablation import compare_variants, write_ablation
from tierspec.evaluation.environment import describe_environment
from tierspec.models import Target
from tierspec.models.loading import load_target
from tierspec.threads import use_threads
from tierspec.training.features import TargetFeatures
from tierspec.training.walk import walk

_CURVE_POINTS = 60
_CACHE_BYTES = 2**30


def run_ablation(
    settings: Settings,
    output: Path,
    stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Makes the runs of `settings.ablation` that have no result yet, and writes the comparison of all that have:
    ablation.json, ablation.md and ablation.html in `output`.

    Each run takes `training.max_steps` steps over the same samples in an order that its seed alone decides, and none
    chooses its checkpoint by the held-out samples. When `stop` says so, the state of the run at hand is saved and the
    comparison covers what is there.

    Returns:
        The comparison (the content of ablation.json).

    Raises:
        SettingError: see `plan_ablation` and `Trial.result`.
    """
    plan = plan_ablation(settings, output)
    results = {trial.name: found for trial in plan.trials if (found := trial.result()) is not None}
    walker: _Walker | None = None
    for number, trial in enumerate(plan.trials, start=1):
        if trial.name in results or stop():
            continue
        trial.directory.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(trial.directory / ".lock", timeout=0):
                if (found := trial.result()) is None:
                    log(f"run {number} of {len(plan.trials)}: {trial.name}")
                    trained = train_drafter(
                        trial.settings, output=trial.directory / "drafter", rollouts=plan.rollouts, stop=stop
                    )
                    if "ended_early" in trained:
                        break
                    walker = walker or _Walker(settings, plan)
                    found = walker.result(trial, trained)
                    trial.result_path.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write_json(trial.result_path, found)
                    shutil.rmtree(trial.directory / "training", ignore_errors=True)
                    log(f"{trial.name}: accept length {found['accept_len']:.3f}")
                results[trial.name] = found
        except Timeout:
            log(f"{trial.name} is being made by another command")
    for trial in plan.trials:  # what other commands have made in the meantime
        if trial.name not in results and (found := trial.result()) is not None:
            results[trial.name] = found
    comparison = compare_variants(
        {variant: list(overrides) for variant, overrides in settings.ablation.variants.items()},
        settings.ablation.baseline,
        [results[trial.name] for trial in plan.trials if trial.name in results],
    )
    missing = [trial.name for trial in plan.trials if trial.name not in results]
    comparison |= {"missing": missing, "complete": not missing, "environment": describe_environment()}
    write_ablation(output, comparison)
    return comparison


class _Walker:
    """The target, loaded once, and its features of the held-out samples, kept for all drafters with the same layers."""

    def __init__(self, settings: Settings, plan: AblationPlan) -> None:
        use_threads(settings.training.threads)
        wanted = settings.target
        self._target: Target = load_target(
            wanted.source, dtype=wanted.dtype, device=wanted.device, numerics=wanted.numerics
        )
        self._max_length, self._heldout = settings.training.max_length, plan.heldout
        self._features: dict[tuple[int, ...], TargetFeatures] = {}

    def result(self, trial: Trial, trained: dict[str, Any]) -> dict[str, Any]:
        drafter = load_drafter(trial.directory / "drafter", self._target)
        layers = drafter.feature_layers
        if layers not in self._features:
            self._features = {
                layers: TargetFeatures(
                    self._target.decoder, layers, max_length=self._max_length, cache_bytes=_CACHE_BYTES
                )
            }
        found = walk(drafter, self._features[layers], self._heldout, drafter.max_draft_tokens)
        return {
            "variant": trial.variant,
            "seed": trial.seed,
            "accept_len": found.accept_len,
            "per_position_acceptance": found.per_position_acceptance,
            "samples": [sample.sample_id for sample in self._heldout],
            "rounds": [rounds for rounds, _ in found.by_sample],
            "accepted": [accepted for _, accepted in found.by_sample],
            **{name: trained[name] for name in ("step", "tokens", "elapsed_s", "loss", "train_accept_len")},
            "curve": _curve(trial.directory / "drafter" / LOG),
            "environment": describe_environment(),
            "identity": trial.identity,
        }


def _curve(log: Path) -> list[tuple[int, float]]:
    """(step, mean simulated accept length of the steps since the last point)."""
    steps = [(record["step"], record["accept_len"]) for record in read_records(log) if record["kind"] == "step"]
    size = max(1, -(-len(steps) // _CURVE_POINTS))
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
