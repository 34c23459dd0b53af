"""What a training state depends on. Whoever changes any of it cannot go on from that state."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tierspec.artifacts import atomic_write_json, read_object, remove_directory, sha256_of, sweep_temporaries
from tierspec.config import Settings
from tierspec.errors import ArtifactError, SettingError
from tierspec.paths import user_path
from tierspec.training.data import Sample

IDENTITY = "identity.json"
_SAMPLES_PER_STEP = ("training.workers", "training.accumulation", "training.batch_sequences")  # their product counts
_NOT_SHAPING = {  # how long a run goes on, what it keeps and where it runs; everything else shapes the weights
    "epochs",
    "max_steps",
    "max_minutes",
    "threads",
    "zero_stage",
    "checkpoint_every",
    "keep_last",
    "evaluate_every",
    "heldout_prompts",
    "features",
    "feature_cache_mb",
    "feature_disk_gb",
    "feature_workers",
    "feature_threads",
    "feature_node",
    "trackers",
    "max_failures",
    "node",
    "overwrite",
}


def training_identity(settings: Settings, samples: Iterable[Sample]) -> dict[str, Any]:
    """Settings that shape the weights, by their dotted names, and a digest of the samples in their order."""
    values = settings.model_dump(mode="json")
    shaping = {name: value for name, value in values["training"].items() if name not in _NOT_SHAPING}
    return {
        "run.seed": values["run"]["seed"],
        **{f"target.{name}": values["target"][name] for name in ("source", "dtype", "numerics")},
        **{f"drafter.{name}": value for name, value in values["drafter"].items()},
        **{f"training.{name}": value for name, value in shaping.items() if name not in ("objective", "warm_start")},
        "training.warm_start": _weights_digest(shaping["warm_start"]),
        **{f"training.objective.{name}": value for name, value in shaping["objective"].items()},
        "rollouts": _samples_digest(samples),
    }


def features_identity(
    settings: Settings, layers: Sequence[int], template_hash: str, samples: Iterable[Sample]
) -> dict[str, Any]:
    """All that the target's features of the samples depend on."""
    target = settings.target
    return {
        "target": {name: getattr(target, name) for name in ("source", "dtype", "device", "numerics")},
        "template_hash": template_hash,
        "layers": list(layers),
        "normaliser": settings.training.objective.verification == "rejection",
        "samples": _samples_digest(samples),
    }


def _samples_digest(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        sampling = sample.sampling and astuple(sample.sampling)
        row = [sample.sample_id, sample.prompt_ids, sample.response_ids, sample.greedy, sampling]
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _weights_digest(directory: str) -> str:
    if not directory:
        return ""
    weights = user_path(directory, "training.warm_start") / "model.safetensors"
    if not weights.is_file():
        raise SettingError(f"training.warm_start is {directory}: no model.safetensors there")
    return sha256_of(weights)


def refuse_changes(state: Path, identity: dict[str, Any]) -> None:
    """SettingError if the training state in a folder comes from other settings or rollouts."""
    if difference := _difference(state, identity):
        raise SettingError(f"{difference} in {state}; use another run.name, or training.overwrite=true to train anew")


def claim_state(state: Path, identity: dict[str, Any], *, anew: bool = False) -> None:
    """Make the folder of the training state; a state of other settings or rollouts in it goes, or any with `anew`."""
    try:
        sweep_temporaries(state)
        if anew or _is_another(state, identity):
            remove_directory(state)
        state.mkdir(parents=True, exist_ok=True)
        atomic_write_json(state / IDENTITY, identity)
    except OSError as error:
        raise SettingError(f"cannot write to {state}: {error.strerror} (setting run.root)") from error


def _is_another(state: Path, identity: dict[str, Any]) -> bool:
    try:
        return bool(_difference(state, identity))
    except ArtifactError:
        return True


def _difference(state: Path, identity: dict[str, Any]) -> str:
    path = state / IDENTITY
    if not path.exists():
        left = state.is_dir() and any(state.iterdir())
        return f"a training state that does not say what it was made with (no {IDENTITY}) lies" if left else ""
    made_with = read_object(path)
    for name, value in identity.items():
        if name not in made_with:
            return f"the training state is of another version, which had no {name}, and lies"
        if name in _SAMPLES_PER_STEP:
            now, then = (math.prod(values[part] for part in _SAMPLES_PER_STEP) for values in (identity, made_with))
            if now != then:
                product = " x ".join(_SAMPLES_PER_STEP)
                return f"{product} is {now} samples a step now, but was {then} for the training state"
        elif made_with[name] != value:
            if name == "rollouts":
                return "the rollouts are not those of the training state"
            return f"{name} is {value!r} now, but was {made_with[name]!r} for the training state"
    return ""
