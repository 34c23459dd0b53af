"""The drafter families, and their checkpoints: a new family is one more line here and one in training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierspec.drafters import dflash, eagle3
from tierspec.drafters.checkpoint import (
    CONFIG_FILE,
    DrafterCheckpoint,
    check_target,
    read_checkpoint,
    read_drafter_config,
)
from tierspec.drafters.config import DrafterConfig
from tierspec.drafters.protocol import Drafter
from tierspec.errors import ArtifactError
from tierspec.models import Target


@dataclass(frozen=True)
class _Family:
    """`module` has the parameters that a checkpoint holds; `drafter` takes config, weights, vocabulary, decoder."""

    config: type[DrafterConfig]
    module: Callable[[Any], nn.Module]
    drafter: Callable[..., Drafter]


_FAMILIES = {
    eagle3.FAMILY: _Family(eagle3.Eagle3Config, eagle3.Eagle3, eagle3.Eagle3Drafter),
    dflash.FAMILY: _Family(dflash.DFlashConfig, dflash.DFlash, dflash.DFlashDrafter),
}


def read_drafter(path: str | Path) -> DrafterCheckpoint:
    """A checkpoint of any family.

    Raises:
        ArtifactError: no checkpoint there, or it is corrupt or of an unknown family.
    """
    config = inspect_drafter(path)
    return read_checkpoint(Path(path), config, parameter_shapes(config))


def inspect_drafter(path: str | Path) -> DrafterConfig:
    """What a checkpoint of any family says of itself; errors as in `read_drafter`."""
    directory = Path(path)
    values = read_drafter_config(directory)
    if values["family"] not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ArtifactError(f"{directory}: drafter family {values['family']!r} is unknown (known: {known})")
    return _FAMILIES[values["family"]].config.from_dict(values, directory / CONFIG_FILE)


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a drafter; nothing is allocated."""
    with torch.device("meta"):
        module = _FAMILIES[config.family].module(config)
    return {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}


def load_drafter(path: str | Path, target: Target) -> Drafter:
    """A checkpoint of any family, ready to draft for `target`.

    Raises:
        ArtifactError: see `read_drafter`; it was trained for another target.
    """
    found = read_drafter(path)
    check_target(found.config, target, Path(path))
    family, head = _FAMILIES[found.config.family], found.verification_head
    return family.drafter(found.config, found.weights, found.vocabulary, target.decoder, head or None)
