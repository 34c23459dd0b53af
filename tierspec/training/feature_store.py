"""Target features on disk: computed once, read at every step. Shards are safetensors files, whole or not there."""

import hashlib
import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from tierspec.artifacts import atomic_write_bytes, atomic_write_json
from tierspec.errors import ArtifactError, SettingError
from tierspec.training.features import FeatureRequest, SequenceFeatures, TargetFeatures

_SHARD_SEQUENCES = 32
_MANIFEST = "manifest.json"
_FIELDS = ("captured", "last", "top_ids")
_OPTIONAL = "log_normaliser"


class FeatureStore:
    """The features of sequences 0 .. n-1; answers like `TargetFeatures`, once all shards are there."""

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        """`identity`: all that the features depend on: target, template, dtype, numerics, layers and the sequences. It
        names the folder below `root`, so a store of something else is never read."""
        text = json.dumps(identity, sort_keys=True)
        self.directory = root / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._identity = identity
        self._open: dict[int, Any] = {}

    def missing(self, sequences: int) -> list[int]:
        """Numbers of the shards that are not there."""
        return [number for number in range(-(-sequences // _SHARD_SEQUENCES)) if not self._path(number).exists()]

    def fill(self, features: TargetFeatures, requests: Sequence[FeatureRequest], shards: Sequence[int]) -> None:
        """Computes and writes `shards` of all `requests`, whose keys are 0 .. n-1.

        Raises:
            SettingError: a feature is not finite, or the disk cannot be written to.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write_json(self.directory / _MANIFEST, self._identity)
            for number in shards:
                part = requests[number * _SHARD_SEQUENCES : (number + 1) * _SHARD_SEQUENCES]
                atomic_write_bytes(self._path(number), to_bytes(part, features(part)))
        except OSError as error:
            raise SettingError(f"training.features: cannot write to {self.directory} ({error.strerror})") from error

    def __call__(self, requests: Sequence[FeatureRequest]) -> list[SequenceFeatures]:
        """The features of every request, in order.

        Raises:
            ArtifactError: a shard is missing, corrupt, or of other sequences.
        """
        return [self._read(request) for request in requests]

    def _read(self, request: FeatureRequest) -> SequenceFeatures:
        number = request.key // _SHARD_SEQUENCES
        path = self._path(number)
        try:
            if number not in self._open:
                self._open[number] = safe_open(str(path), framework="pt")
            shard = self._open[number]
            found = _unpacked(request, shard.get_tensor, shard.keys())
            if found is None:
                raise ArtifactError(f"{path} holds other tokens for sequence {request.key}; remove the folder")
            return found
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path} is missing or corrupt ({error}); remove the folder") from error

    def _path(self, number: int) -> Path:
        return self.directory / f"features-{number:05d}.safetensors"


def store_bytes(tokens: int, feature_layers: int, hidden_size: int, itemsize: int) -> int:
    """What a store of `tokens` tokens takes on disk, in bytes."""
    return tokens * ((feature_layers + 1) * hidden_size * itemsize + 2 * 8)


def to_bytes(requests: Sequence[FeatureRequest], features: Sequence[SequenceFeatures]) -> bytes:
    """Several sequences' features with their tokens. SettingError if any is not finite."""
    tensors: dict[str, torch.Tensor] = {}
    for request, found in zip(requests, features, strict=True):
        if not (torch.isfinite(found.captured).all() and torch.isfinite(found.last).all()):
            raise SettingError(f"training.features: the target's features of sequence {request.key} are not finite")
        parts = {"token_ids": torch.tensor(request.token_ids)}
        parts |= {name: getattr(found, name) for name in _FIELDS}
        if found.log_normaliser is not None:
            parts[_OPTIONAL] = found.log_normaliser
        tensors |= {f"{request.key}.{name}": tensor.cpu().contiguous() for name, tensor in parts.items()}
    return save(tensors)


def from_bytes(requests: Sequence[FeatureRequest], data: bytes) -> list[SequenceFeatures]:
    """What `to_bytes` wrote. ArtifactError if it is not of these requests."""
    tensors = load(data)
    features = []
    for request in requests:
        try:
            found = _unpacked(request, tensors.__getitem__, tensors)
        except KeyError:
            found = None
        if found is None:
            raise ArtifactError(f"training.features: features of other sequences than {request.key} arrived")
        features.append(found)
    return features


def _unpacked(
    request: FeatureRequest, get: Callable[[str], torch.Tensor], names: Container[str]
) -> SequenceFeatures | None:
    """The features of a request, None if they are of other tokens."""
    if get(f"{request.key}.token_ids").tolist() != list(request.token_ids):
        return None
    extra = f"{request.key}.{_OPTIONAL}"
    parts = {name: get(f"{request.key}.{name}") for name in _FIELDS}
    return SequenceFeatures(**parts, log_normaliser=get(extra) if extra in names else None)
