"""What a piece of evidence depends on, so that one of older commits still counts while that is unchanged."""

import hashlib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOLDERS = (
    "tierspec/models",
    "tierspec/sampling",
    "tierspec/drafters",
    "tierspec/verification",
    "tierspec/decoding",
    "actors",
)
_SUFFIXES = (".py", ".cpp", ".yaml")


def sources_sha256(*more: str) -> str:
    """Digest of the sources of the decoder, the drafters, the verification and the processes that serve them, and of
    the folders and files `more`."""
    digest = hashlib.sha256()
    for place in (*_FOLDERS, *more):
        path = _ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in _SUFFIXES:
                digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
