"""Calibration: the neural drafter's settings side by side on held-out prompts, and which of them is fastest here."""

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from pipelines.evaluation import checkpoint_prompts, drafter_directory, encode_first_turns
from pipelines.prompts import read_prompts, spread
from tierspec.artifacts import atomic_write_json
from tierspec.config import DraftSettings, Settings
from tierspec.decoding import SamplingParams
from tierspec.drafters import load_drafter
from tierspec.errors import SettingError
from tierspec.evaluation.calibration import choose, rank
from tierspec.evaluation.comparison import Trial, compare
from tierspec.evaluation.environment import describe_environment
from tierspec.evaluation.methods import build_methods
from tierspec.models import load_target
from tierspec.threads import use_threads

RESULT = "result.json"


def calibrate(
    settings: Settings,
    output: Path,
    stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Times `draft` as it is and with every pair of `calibration.max_tokens` and `calibration.min_survival`, by the
    neural drafter alone. Writes result.json, whose content is returned, or nothing if `stop` came before the end.

    The prompts are those that chose the drafter's checkpoint where it says which, so that an evaluation, which leaves
    them out, judges settings that were not chosen on its own prompts. A setting is chosen over the present one only if
    it is surely faster (see `choose`).

    Raises:
        SettingError: no drafter, prompts that cannot be read, or a threshold for a drafter without verification head.
        KeyboardInterrupt: `stop` before the first prompt was done.
    """
    (output / RESULT).unlink(missing_ok=True)
    use_threads(settings.target.threads)
    wanted, chosen = settings.target, settings.calibration
    directory = drafter_directory(settings)
    read = read_prompts(settings.prompts.heldout, "prompts.heldout")
    chose = checkpoint_prompts(directory)
    prompts = spread([prompt for prompt in read if prompt.sample_id in chose] or read, chosen.prompts)
    target = load_target(wanted.source, dtype=wanted.dtype, device=wanted.device, numerics=wanted.numerics)
    encoded = encode_first_turns(prompts, target, settings, "calibration.max_new_tokens", chosen.max_new_tokens)
    drafter = load_drafter(directory, target)
    if any(chosen.min_survival) and not drafter.predicts_survival:
        raise SettingError(
            f"calibration.min_survival: {directory} has no trained verification head; "
            "set it to [0] to try draft.max_tokens alone"
        )

    longest = max(len(ids) for _, ids in encoded) + chosen.max_new_tokens
    methods = [
        replace(build_methods(["neural"], target, drafter, draft, max_tokens=longest)[0], name=name)
        for name, draft in _candidates(settings, drafter.max_draft_tokens).items()
    ]

    def on_trial(trial: Trial) -> None:
        speeds = ", ".join(f"{len(run.token_ids) / run.seconds:.0f}" for run in trial.answers.values())
        log(f"{trial.prompt_id}, tokens/s of each setting: {speeds}")

    sampling = SamplingParams(chosen.max_new_tokens, settings.evaluation.temperature, seed=settings.run.seed)
    trials = compare(methods, encoded, sampling, repeats=chosen.repeats, on_trial=on_trial, stop=stop)
    if not trials:
        raise KeyboardInterrupt
    ranked = rank(trials, methods[0].name, seed=settings.run.seed)
    result = {
        "fastest": choose(ranked).setting,
        "present": methods[0].name,
        "candidates": [asdict(candidate) for candidate in ranked],
        "complete": len(trials) == len(encoded),
        "prompts": [trial.prompt_id for trial in trials],
        "drafter": str(directory),
        "target": wanted.source,
        "dtype": wanted.dtype,
        "device": wanted.device,
        "protocol": {"batch": 1, "repeats": chosen.repeats, "max_new_tokens": chosen.max_new_tokens},
        **describe_environment(),
    }
    if result["complete"]:
        atomic_write_json(output / RESULT, result)
    return result


def _candidates(settings: Settings, longest_draft: int) -> dict[str, DraftSettings]:
    """By the overrides that make them, the present settings first; no draft is longer than the drafter makes."""
    present = (settings.draft.max_tokens, settings.draft.min_survival)
    pairs = [present, *product(settings.calibration.max_tokens, settings.calibration.min_survival)]
    return {
        f"draft.max_tokens={tokens} draft.min_survival={least:g}": settings.draft.model_copy(
            update={"max_tokens": tokens, "min_survival": least}
        )
        for tokens, least in dict.fromkeys((min(tokens, longest_draft), least) for tokens, least in pairs)
    }
