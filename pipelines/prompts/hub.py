"""Prompt sets from the Hugging Face hub, through its own library `datasets` (an extra)."""

import importlib
from collections.abc import Iterator
from typing import Any

from tierspec.errors import SettingError

PREFIX = "hub:"


def hub_rows(entry: str, setting: str) -> Iterator[tuple[str, object]]:
    """(place, row) of every row of `hub:<owner>/<name>[:<split>]`, by default of the split `train`.

    Raises:
        SettingError: the extra is not installed, or the data set cannot be had.
    """
    name, _, split = entry.removeprefix(PREFIX).partition(":")
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise SettingError(f"{setting}: {entry} needs the package datasets: pip install 'tierspec[hub]'") from error
    try:
        for number, row in enumerate(library.load_dataset(name, split=split or "train", streaming=True)):
            yield f"{entry} row {number}", row
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SettingError(f"{setting}: {entry} cannot be read: {reason}") from error
