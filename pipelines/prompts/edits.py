"""Editing tasks, generated: a document and what to change in it, the whole document asked back.

The same prompts come out on every machine. Kinds: rename (an identifier of a program), reformat (CSV to JSON),
translate_keys (of a JSON document), patch (a diff to apply).
"""

import difflib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

_SEED = 4
_PER_KIND = 12
_NOUNS = (
    "order",
    "invoice",
    "sensor",
    "ticket",
    "parcel",
    "account",
    "recipe",
    "flight",
    "lesson",
    "vessel",
    "contract",
)
_FIELDS = (
    "name",
    "city",
    "status",
    "price",
    "weight",
    "owner",
    "region",
    "level",
    "category",
    "date",
    "amount",
    "score",
)
_WORDS = (
    "amber",
    "north",
    "quiet",
    "steady",
    "early",
    "harbor",
    "copper",
    "maple",
    "river",
    "stone",
    "cedar",
    "winter",
)
_GERMAN = {
    **{"name": "bezeichnung", "city": "stadt", "status": "zustand", "price": "preis", "weight": "gewicht"},
    **{
        "owner": "besitzer",
        "region": "gebiet",
        "level": "stufe",
        "category": "kategorie",
        "date": "datum",
        "amount": "menge",
    },
    **{"score": "punkte", "id": "kennung"},
}
_ANSWER = "Return the whole result in one code block, and nothing else."


def edits() -> Iterator[tuple[str, dict[str, Any]]]:
    """One change each."""
    for kind, make in _KINDS.items():
        for index in range(_PER_KIND):
            name = f"edits-{kind}-{index:02d}"
            yield name, _row(name, "edits", kind, [make(random.Random(f"{_SEED}/{name}"))])


def edits_in_turns() -> Iterator[tuple[str, dict[str, Any]]]:
    """Three changes to one program, one after the other."""
    for index in range(2 * _PER_KIND):
        name = f"edits-in-turns-{index:02d}"
        rng = random.Random(f"{_SEED}/{name}")
        noun, fields = rng.choice(_NOUNS), rng.sample(_FIELDS, 4)
        first, second = rng.sample(_WORDS, 2)
        turns = [
            f"Rename the function load_{noun}s to read_{noun}s in this program. {_ANSWER}\n\n"
            f"```python\n{_program(noun, fields)}```",
            f"Now rename the argument {noun}s to {first}_{noun}s everywhere. {_ANSWER}",
            f'Now add the constant {second.upper()} = "{second}" as the first line. {_ANSWER}',
        ]
        yield name, _row(name, "edits_in_turns", "rename", turns)


def _row(name: str, source: str, kind: str, turns: list[str]) -> dict[str, Any]:
    return {"id": name, "source": source, "kind": kind, "turns": turns}


def _rename(rng: random.Random) -> str:
    noun, fields = rng.choice(_NOUNS), rng.sample(_FIELDS, 4)
    new = rng.choice(_WORDS)
    program = _program(noun, fields)
    return f"Rename the variable {noun} to {new}_{noun} in this program. {_ANSWER}\n\n```python\n{program}```"


def _reformat(rng: random.Random) -> str:
    fields = rng.sample(_FIELDS, 4)
    lines = [",".join(["id", *fields])]
    lines += [",".join(str(value) for value in record.values()) for record in _records(rng, fields, 8)]
    table = "\n".join(lines)
    return f"Turn this CSV into a JSON list with one object per line. {_ANSWER}\n\n```csv\n{table}\n```"


def _translate_keys(rng: random.Random) -> str:
    fields = rng.sample(_FIELDS, 4)
    document = json.dumps(_records(rng, fields, 5), indent=2)
    pairs = ", ".join(f"{field} -> {_GERMAN[field]}" for field in ["id", *fields])
    return f"Replace the keys of this JSON ({pairs}) and leave the values. {_ANSWER}\n\n```json\n{document}\n```"


def _patch(rng: random.Random) -> str:
    noun, fields = rng.choice(_NOUNS), rng.sample(_FIELDS, 4)
    before = _program(noun, fields).splitlines()
    after = list(before)
    place = rng.randrange(4, len(after))
    after[place] = f"{after[place]}  # {rng.choice(_WORDS)}"
    after.insert(0, f"import {rng.choice(['csv', 'math', 'os', 'sys'])}")
    diff = "\n".join(difflib.unified_diff(before, after, "a.py", "b.py", lineterm="", n=1))
    program = "\n".join(before)
    return f"Apply this patch to the program. {_ANSWER}\n\n```diff\n{diff}\n```\n\n```python\n{program}\n```"


def _records(rng: random.Random, fields: list[str], count: int) -> list[dict[str, Any]]:
    return [
        {"id": index} | {field: f"{rng.choice(_WORDS)} {rng.choice(_NOUNS)}" for field in fields}
        for index in range(1, count + 1)
    ]


def _program(noun: str, fields: list[str]) -> str:
    checks = "".join(
        f'        if {noun}["{field}"] is None:\n            raise ValueError("{noun} without {field}")\n'
        for field in fields
    )
    shown = "\n".join(f'        print("{field}:", {noun}["{field}"])' for field in fields)
    return (
        f"import json\n\n\ndef load_{noun}s(path):\n    with open(path) as file:\n        return json.load(file)\n\n\n"
        f"def check_{noun}s({noun}s):\n    for {noun} in {noun}s:\n{checks}    return {noun}s\n\n\n"
        f"def show_{noun}s({noun}s):\n    for {noun} in {noun}s:\n{shown}\n\n\n"
        f'if __name__ == "__main__":\n    show_{noun}s(check_{noun}s(load_{noun}s("{noun}s.json")))\n'
    )


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "rename": _rename,
    "reformat": _reformat,
    "translate_keys": _translate_keys,
    "patch": _patch,
}
GENERATED = {"edits": edits, "edits_in_turns": edits_in_turns}
