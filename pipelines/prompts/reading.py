"""Prompt sets from files (JSON lines or Parquet, by path, by glob, or built in) and from the hub."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.prompts.edits import GENERATED
from pipelines.prompts.hub import PREFIX, hub_rows
from pipelines.prompts.packaged import PACKAGED
from pipelines.prompts.prompt import Prompt, parse_row
from tierspec.errors import SettingError
from tierspec.paths import user_path

FILES = ("train", "heldout", "new_kinds")
BUILTIN = (*FILES, *GENERATED, *PACKAGED)
_SUFFIXES = (".jsonl", ".json", ".parquet")


def read_prompts(entries: Sequence[str], setting: str) -> list[Prompt]:
    """`read_prompt_sets`, all in one list."""
    return [prompt for members in read_prompt_sets(entries, setting) for prompt in members]


def read_prompt_sets(entries: Sequence[str], setting: str) -> list[list[Prompt]]:
    """The prompts of each entry in order, with sample ids that are unique over all.

    Args:
        entries: names of `BUILTIN` behind `builtin:`, data sets of the hub behind `hub:`, paths or globs.
        setting: name of the setting that holds `entries`, for messages.

    Raises:
        SettingError: an entry without a file, an empty file, or a malformed row (with file and line).
    """
    seen: set[str] = set()
    return [_with_unique_ids(_read_entry(entry, setting), seen) for entry in entries]


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts (0: all), at even distances, so that every kind is kept as far as it can be."""
    if not limit or len(prompts) <= limit:
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _paths(entry: str, setting: str) -> list[Path]:
    if entry.startswith("builtin:"):
        name = entry.removeprefix("builtin:")
        if name not in BUILTIN:
            raise SettingError(
                f"{setting}: {entry} is unknown, built in are {', '.join(f'builtin:{b}' for b in BUILTIN)}"
            )
        return [Path(str(files("tierspec") / "data" / "prompts" / f"{name}.jsonl"))]
    path = user_path(entry, setting)
    if path.is_dir():
        raise SettingError(f"{setting}: {entry} is a folder; name its files, for example {entry.rstrip('/')}/*.jsonl")
    paths = [path] if path.exists() else sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not paths:
        raise SettingError(f"{setting}: {entry} matches no file")
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise SettingError(f"{setting}: {path} is neither JSON lines nor Parquet ({', '.join(_SUFFIXES)})")
    return paths


def _read_entry(entry: str, setting: str) -> list[Prompt]:
    if entry.startswith(PREFIX):
        sources = {entry: (entry.removeprefix(PREFIX).partition(":")[0], hub_rows(entry, setting))}
    elif (name := entry.removeprefix("builtin:")) in GENERATED and name != entry:
        sources = {entry: (name, GENERATED[name]())}
    elif name in PACKAGED and name != entry:
        sources = {entry: (name, PACKAGED[name](setting))}
    else:
        sources = {str(path): (path.stem, _rows(path)) for path in _paths(entry, setting)}
    prompts: list[Prompt] = []
    for name, (source, rows) in sources.items():
        found = len(prompts)
        prompts.extend(_parsed(rows, source))
        if len(prompts) == found:
            raise SettingError(f"{setting}: {name} holds no prompts")
    return prompts


def _parsed(rows: Iterator[tuple[str, object]], source: str) -> Iterator[Prompt]:
    for place, row in rows:
        try:
            prompt = parse_row(row, source)
        except ValueError as error:
            raise SettingError(f"{place}: {error}") from None
        yield prompt


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror or error}") from None


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield place, json.loads(text)
            except UnicodeDecodeError as error:
                raise SettingError(f"{place}: not UTF-8 at byte {error.start}") from None
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise SettingError(f"{place}: not one JSON object per line ({reason})") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _with_unique_ids(prompts: list[Prompt], seen: set[str]) -> list[Prompt]:
    """Two sets may both number their rows: a repeated id gets its content hash, a repeat of that its count. `seen`
    takes the ids in."""
    unique: list[Prompt] = []
    for prompt in prompts:
        candidate, count = prompt.sample_id, 1
        while candidate in seen:
            candidate = f"{prompt.sample_id}-{prompt.content_hash}" + (f"-{count}" if count > 1 else "")
            count += 1
        seen.add(candidate)
        unique.append(replace(prompt, sample_id=candidate))
    return unique
