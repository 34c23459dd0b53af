"""The page of a training run: how loss and accept length went, and one held-out sample token by token."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from tierspec.evaluation.page import render_page
from tierspec.training.token_view import walked_blocks

_POINTS = 200
_ROUNDS = 40
_CONTEXT = 6


def render_training_page(
    result: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    sample: Mapping[str, Any] | None,
) -> str:
    """One page that loads nothing from elsewhere.

    result: content of result.json; records: of metrics.jsonl; sample: as `readable_sample` made it, None if there is
    none.
    """
    steps, heldout = [], []
    for record in records:
        if record["kind"] == "step":
            steps.append(record)
        elif record["kind"] == "heldout":
            heldout.append((record["step"], record["accept_len"]))
    last = max((record["step"] for record in steps), default=1)
    curves = [
        _chart("loss", {"training": _thinned([(r["step"], r["loss"]) for r in steps])}, last),
        _chart(
            "accept length",
            {"simulated on training samples": _thinned([(r["step"], r["accept_len"]) for r in steps])}
            | ({"walked on held-out samples": heldout} if heldout else {}),
            last,
        ),
    ]
    shown = {name: value for name, value in result.items() if isinstance(value, str | int | float | bool)}
    return render_page("training", {"text": _text}, result=shown, curves=curves, sample=sample)


def readable_sample(view: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """What the page shows of a `token_view`: plain values with texts. decode: the text of token ids."""
    ids, first = view["token_ids"], view["supervised_from"]
    blocks = walked_blocks(view)
    return {
        "sample_id": view["sample_id"],
        "prompt": decode(ids[:first]),
        "response": decode(ids[first:]),
        "rounds": [_round(block, ids, decode) for block in blocks[:_ROUNDS]],
        "all_rounds": len(blocks),
    }


def _round(block: Mapping[str, Any], ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    anchor, survived = block["anchor"], block["survived"]
    states = ["kept"] * survived + ["missed"] + ["late"] * len(block["drafted"])
    own = anchor + survived + 1
    return {
        "known": decode(ids[max(0, anchor - _CONTEXT + 1) : anchor + 1]),
        "drafts": [
            {"text": decode([token]), "state": state, "belief": belief}
            for token, state, belief in zip_longest(block["drafted"], states[: len(block["drafted"])], block["belief"])
        ],
        "target": decode(ids[own : own + 1]) if own < len(ids) else "",
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means of equal stretches, at most `_POINTS` of them, each at its last step."""
    size = max(1, -(-len(points) // _POINTS))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _chart(title: str, lines: Mapping[str, Sequence[tuple[int, float]]], last: int) -> dict[str, Any]:
    values = [value for points in lines.values() for _, value in points] or [0.0, 1.0]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return {
        "title": title,
        "low": low,
        "high": high,
        "last": last,
        "lines": {
            name: [(step / last, (high - value) / span) for step, value in points] for name, points in lines.items()
        },
    }


def _text(piece: str) -> str:
    """A token's text with its white space made visible."""
    return piece.replace(" ", "·").replace("\n", "↵").replace("\t", "→") or "∅"
