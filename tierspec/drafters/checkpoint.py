"""Drafter checkpoints of all families: ``config.json``, and ``model.safetensors`` with the tensor names that engines
use.

The embedding is the target's and not stored; the draft vocabulary and the verification head ride along, the latter
under ``verification_head.``.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tierspec.drafters.config import DrafterConfig
from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.errors import ArtifactError
from tierspec.models import Target

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_HEAD_PREFIX = "verification_head."
Config = TypeVar("Config", bound=DrafterConfig)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class DrafterCheckpoint(Generic[Config]):
    """What a checkpoint holds; `verification_head` is empty if none was saved."""

    config: Config
    weights: dict[str, Tensor]
    vocabulary: DraftVocabulary
    verification_head: dict[str, Tensor]


def embedding_sha256(embedding: Tensor) -> str:
    """Identity of a target's embedding [V, D]: SHA-256 of its bytes in bf16, whatever dtype it is loaded in."""
    data = embedding.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def save_checkpoint(
    directory: Path,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    vocabulary: DraftVocabulary,
    verification_head: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes both files into an existing directory; weights in `dtype`."""
    head = {f"{_HEAD_PREFIX}{name}": tensor for name, tensor in (verification_head or {}).items()}
    tensors = {name: _plain(tensor, dtype) for name, tensor in {**weights, **head}.items()}
    tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")


def read_checkpoint(directory: Path, config: Config, shapes: Shapes) -> DrafterCheckpoint[Config]:
    """The tensors beside a configuration; `shapes`: name and shape of every tensor of the drafter itself.

    Raises:
        ArtifactError: the file is missing or corrupt; a tensor is missing, unknown, of the wrong shape or not finite;
            the vocabulary maps disagree.
    """
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} is missing, corrupt or truncated ({error})") from None
    head = {n.removeprefix(_HEAD_PREFIX): tensors.pop(n) for n in list(tensors) if n.startswith(_HEAD_PREFIX)}
    shapes = {**shapes, "d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise ArtifactError(f"{path}: tensor {name} is {'missing' if name in shapes else 'unknown'}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ArtifactError(f"{path}: tensor {name} has shape {list(tensors[name].shape)}, not {list(shape)}")
        if name not in ("d2t", "t2d") and not tensors[name].is_floating_point():
            raise ArtifactError(f"{path}: tensor {name} holds {tensors[name].dtype}, not floating-point numbers")
        if not torch.isfinite(tensors[name]).all():
            raise ArtifactError(f"{path}: tensor {name} is not finite")
    try:
        vocabulary = DraftVocabulary.from_maps(tensors.pop("d2t"), tensors.pop("t2d"))
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from None
    return DrafterCheckpoint(config, tensors, vocabulary, head)


def check_target(config: DrafterConfig, target: Target, directory: Path) -> None:
    """ArtifactError if the drafter was trained for a target with another embedding."""
    embedding = target.decoder.embedding
    if tuple(embedding.shape) != (config.vocab_size, config.target_hidden_size) or (
        embedding_sha256(embedding) != config.embedding_sha256
    ):
        raise ArtifactError(f"{directory}: this drafter was trained for {config.target}, not for {target.source}")


def read_drafter_config(directory: Path) -> dict[str, Any]:
    """A drafter's ``config.json`` of any family. ArtifactError if it is missing or malformed."""
    path = directory / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"no drafter in {directory}: cannot read {CONFIG_FILE} ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("family"), str):
        raise ArtifactError(f"{path} does not describe a drafter: it has no field family")
    return values


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous().clone()
