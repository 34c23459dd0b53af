"""Reading tensors of a checkpoint directory, with errors that name the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tierspec.errors import ArtifactError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightReader:
    """Tensors by name from ``model.safetensors``; each is read when asked for."""

    def __init__(self, directory: Path) -> None:
        path = directory / _SINGLE
        if not path.is_file():
            hint = "sharded checkpoints are not supported" if (directory / _INDEX).is_file() else f"no {_SINGLE}"
            raise ArtifactError(f"target.source: {directory}: {hint}")
        self._path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            self._names = set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"target.source: {path} is corrupt or truncated ({error})") from None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, on CPU in the file's dtype.

        Raises:
            ArtifactError: it is missing, of another shape, or not readable.
        """
        if name not in self._names:
            raise ArtifactError(f"target.source: {self._path} has no tensor {name}")
        found = tuple(self._file.get_slice(name).get_shape())
        if found != shape:
            raise ArtifactError(
                f"target.source: {self._path}: tensor {name} has shape {list(found)}, not {list(shape)}"
            )
        try:
            return self._file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"target.source: {self._path}: tensor {name} is not readable ({error})") from None


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
