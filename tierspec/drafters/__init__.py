"""Draft sources: neural drafters behind one protocol, and the suffix cache."""

from collections.abc import Callable
from pathlib import Path

from tierspec.drafters import eagle3
from tierspec.drafters.eagle3.checkpoint import read_drafter_config
from tierspec.drafters.protocol import Drafter, DrafterState, DraftRequest, FeatureProjection, UnknownPrefix
from tierspec.errors import ArtifactError
from tierspec.models import Target

_LOADERS: dict[str, Callable[[Path, Target], Drafter]] = {eagle3.FAMILY: eagle3.load_eagle3}


def load_drafter(path: str | Path, target: Target) -> Drafter:
    """Any drafter checkpoint, ready to draft for `target`.

    Raises:
        ArtifactError: no checkpoint there, or it is corrupt, of an unknown family, or was trained for another target.
    """
    directory = Path(path)
    family = read_drafter_config(directory)["family"]
    if family not in _LOADERS:
        raise ArtifactError(f"{directory}: drafter family {family!r} is unknown (known: {', '.join(_LOADERS)})")
    return _LOADERS[family](directory, target)


__all__ = [
    "DraftRequest",
    "Drafter",
    "DrafterState",
    "FeatureProjection",
    "UnknownPrefix",
    "load_drafter",
]
