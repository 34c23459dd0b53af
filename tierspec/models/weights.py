"""Reading tensors of a checkpoint directory, with errors that name the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tierspec.errors import ArtifactError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightReader:
    """Tensors by name from ``model.safetensors`` or the shards of its index; each is read when asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises ArtifactError if a file is missing or corrupt, or if a tensor is not where the index says."""
        self._directory = directory
        self._files: dict[str, Any] = {}
        single = directory / _SINGLE
        if single.is_file():
            self._place = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        elif (directory / _INDEX).is_file():
            self._place = _weight_map(directory / _INDEX)
            for shard in sorted(set(self._place.values())):
                there = set(self._open(shard).keys())
                for name in sorted(name for name, place in self._place.items() if place == shard):
                    if name not in there:
                        raise ArtifactError(f"target.source: {directory / shard} has no tensor {name}")
        else:
            raise ArtifactError(f"target.source: {directory}: no {_SINGLE}")

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, on CPU in the file's dtype.

        Raises:
            ArtifactError: it is missing, of another shape, or not readable.
        """
        if name not in self._place:
            raise ArtifactError(f"target.source: {self._directory / _SINGLE} has no tensor {name}")
        path, file = self._directory / self._place[name], self._files[self._place[name]]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise ArtifactError(f"target.source: {path}: tensor {name} has shape {list(found)}, not {list(shape)}")
        try:
            return file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"target.source: {path}: tensor {name} is not readable ({error})") from None

    def _open(self, name: str) -> Any:
        path = self._directory / name
        if not path.is_file():
            raise ArtifactError(f"target.source: {self._directory}: no {name}, which {_INDEX} names")
        try:
            self._files[name] = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"target.source: {path} is corrupt or truncated ({error})") from None
        return self._files[name]


def _weight_map(path: Path) -> dict[str, str]:
    """File of every tensor, by the names of an index."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        good = all(isinstance(file, str) and Path(file).name == file for file in places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"target.source: {path} is not an index of shards ({error})") from None
    if not good:
        raise ArtifactError(f"target.source: {path} is not an index of shards (weight_map names no files)")
    return dict(places)


def has_weights(directory: Path) -> bool:
    """Whether a directory holds weights, whole or not."""
    return (directory / _SINGLE).is_file() or (directory / _INDEX).is_file()


def read_config(directory: Path) -> dict:
    """The directory's ``config.json``. Raises ArtifactError if it is missing or is not a JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise ArtifactError(f"target.source: {directory} has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"target.source: {path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ArtifactError(f"target.source: {path} is not a JSON object")
    return config
