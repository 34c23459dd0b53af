"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path

from tierspec.errors import SettingError


def user_path(text: str, setting: str) -> Path:
    """A path as a user writes it, `~` included. SettingError if it names a user that is not known here."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingError(f"{setting}: {text}: {error}") from error


def cache_directory() -> Path:
    """The user's cache for fetched models and compiled kernels: $TIERSPEC_CACHE, else $XDG_CACHE_HOME/tierspec, else
    ~/.cache/tierspec. Not created here."""
    own = os.environ.get("TIERSPEC_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "tierspec"
