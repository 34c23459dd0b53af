"""The payoff predictor: how many tokens of a suffix draft will be accepted, by a small MLP (HVD, arXiv 2606.01019).

Two hidden layers of 256 units with ReLU, one linear output, over z-scored features; the answer is cut to the draft's
length. It runs in NumPy on the engine's thread: a decision is tens of microseconds, and no device is asked.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from tierspec.artifacts import atomic_write_bytes, atomic_write_json, read_object
from tierspec.drafters.payoff.features import FEATURES, TokenClasses
from tierspec.errors import ArtifactError

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
KIND = "payoff"
HIDDEN = 256
Array = NDArray[np.float32]


def parameter_shapes(features: int = len(FEATURES)) -> dict[str, tuple[int, ...]]:
    """Name and shape of everything learned; `mean` and `std` are those of the training rows."""
    return {
        "mean": (features,),
        "std": (features,),
        "hidden1.weight": (HIDDEN, features),
        "hidden1.bias": (HIDDEN,),
        "hidden2.weight": (HIDDEN, HIDDEN),
        "hidden2.bias": (HIDDEN,),
        "output.weight": (1, HIDDEN),
        "output.bias": (1,),
    }


@dataclass(frozen=True)
class PayoffPredictor:
    """`target`: source of the model whose text it learned from; `suffix`: settings of the drafts it learned from, which
    must be those it is asked about; `metrics`: how well it did on requests that it was not trained on."""

    parameters: Mapping[str, Array]
    classes: TokenClasses
    target: str
    suffix: Mapping[str, Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, rows: Sequence[Sequence[float]] | Array) -> Array:
        """Rows [B, features] → accepted draft tokens to expect [B], from 0 to the draft's length."""
        p = self.parameters
        raw: Array = np.asarray(rows, dtype=np.float32)
        x: Array = (raw - p["mean"]) / p["std"]
        x = np.maximum(x @ p["hidden1.weight"].T + p["hidden1.bias"], np.float32(0))
        x = np.maximum(x @ p["hidden2.weight"].T + p["hidden2.bias"], np.float32(0))
        out: Array = (x @ p["output.weight"].T + p["output.bias"])[:, 0]
        return np.clip(out, 0.0, raw[:, FEATURES.index("draft_length")])

    def save(self, directory: Path) -> None:
        """Writes both files, the one that makes it a predictor last."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_FILE).unlink(missing_ok=True)
        tensors = {name: np.ascontiguousarray(value) for name, value in self.parameters.items()}
        atomic_write_bytes(directory / WEIGHTS_FILE, save(tensors | {"classes": self.classes}))
        config = {"kind": KIND, "features": list(FEATURES), "target": self.target, "suffix": dict(self.suffix)}
        atomic_write_json(directory / CONFIG_FILE, config | {"metrics": dict(self.metrics)})


def load_payoff(directory: Path, *, vocab_size: int, suffix: Mapping[str, Any]) -> PayoffPredictor:
    """The predictor in `directory`, for a vocabulary and for drafts made with the settings `suffix`.

    Raises:
        ArtifactError: none there, corrupt, or made for other features, another vocabulary or other drafts.
    """
    if not (directory / CONFIG_FILE).is_file():
        raise ArtifactError(f"{directory} holds no payoff predictor: run jobs.payoff first")
    config = read_object(directory / CONFIG_FILE)
    if config.get("kind") != KIND or not isinstance(config.get("suffix"), dict):
        raise ArtifactError(f"{directory / CONFIG_FILE} is not that of a payoff predictor")
    if config.get("features") != list(FEATURES):
        raise ArtifactError(f"{directory} was trained on other features: run jobs.payoff again")
    changed = [name for name, value in suffix.items() if config["suffix"].get(name) != value]
    if changed:
        was = config["suffix"].get(changed[0])
        raise ArtifactError(
            f"draft.suffix.{changed[0]} is {suffix[changed[0]]}, but the payoff predictor in {directory} was trained "
            f"with {was}: set it back, or run jobs.payoff again"
        )
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error
    for name, shape in (parameter_shapes() | {"classes": (vocab_size,)}).items():
        found = tensors[name].shape if name in tensors else None
        if found != shape:
            raise ArtifactError(f"{path}: {name} is {found or 'missing'}, expected {shape}")
    if not all(np.isfinite(tensors[name]).all() for name in parameter_shapes()):
        raise ArtifactError(f"{path} holds values that are not finite")
    classes = tensors.pop("classes")
    metrics = config.get("metrics") or {}
    return PayoffPredictor(tensors, classes, str(config.get("target")), config["suffix"], metrics)
