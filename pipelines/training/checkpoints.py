"""Checkpoints on disk against Ray Train's register of them."""

from pathlib import Path

from pipelines.training.job import METRICS, PROGRESS, TRAINING_STATE
from tierspec.artifacts import read_object, remove_directory
from tierspec.errors import ArtifactError

_REGISTER = "checkpoint_manager_snapshot.json"


def drop_unregistered(directory: Path) -> None:
    """Remove what a killed run had not yet registered: Ray knows only registered checkpoints, and would keep the others
    for ever.

    Raises:
        ArtifactError: the register is damaged, or gone though it must have been there, or names one that is gone.
    """
    there = _there(directory)
    for name in there.keys() - _registered(directory, there):
        remove_directory(there[name])


def is_damaged(directory: Path) -> bool:
    """Whether `drop_unregistered` would refuse."""
    try:
        _registered(directory, _there(directory))
    except ArtifactError:
        return True
    return False


def _is_whole(checkpoint: Path) -> bool:
    return all((checkpoint / name).exists() for name in (TRAINING_STATE, PROGRESS, METRICS))


def _there(directory: Path) -> dict[str, Path]:
    return {path.name: path for path in directory.glob("checkpoint_*") if path.is_dir()}


def _registered(directory: Path, there: dict[str, Path]) -> set[str]:
    register = directory / _REGISTER
    if not register.exists() and sum(map(_is_whole, there.values())) < 2:  # killed before the first was registered
        return set()
    try:
        names = {checkpoint["checkpoint_dir_name"] for checkpoint in read_object(register)["checkpoint_results"]}
    except (ArtifactError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{register} does not list the checkpoints beside it; training.overwrite=true trains anew"
        ) from error
    if missing := names - there.keys():
        raise ArtifactError(f"{directory / min(missing)} is missing; training.overwrite=true trains anew")
    return names
