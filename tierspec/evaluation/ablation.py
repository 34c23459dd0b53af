"""The report of an ablation: accept length by variant, differences to the baseline, and learning curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierspec.artifacts import atomic_write_json, atomic_write_text
from tierspec.evaluation.page import render_page
from tierspec.evaluation.paired import WalkedRun, paired_difference
from tierspec.evaluation.report import aligned, number

_COLUMNS = ("variant", "runs", "accept len", "lowest", "highest", "difference", "95 % interval")
_COLOURS = ("#5b6675", "#2f6fb2", "#b2572f", "#14713c", "#7b3fa0", "#a8321e", "#0f7f8c", "#8c6d0f")


def compare_variants(
    variants: Mapping[str, Sequence[str]], baseline: str, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The comparison of all finished runs.

    variants: overrides by name, in the order of the table. results: of each run variant, seed, accept_len,
    per_position_acceptance, rounds and accepted by held-out sample, and curve [(step, accept length)].
    """
    runs: dict[str, dict[int, WalkedRun]] = {name: {} for name in variants}
    for result in results:
        runs[result["variant"]][result["seed"]] = WalkedRun(
            np.asarray(result["rounds"], dtype=np.int64), np.asarray(result["accepted"], dtype=np.int64)
        )
    entries = {}
    for name, overrides in variants.items():
        mine = [result for result in results if result["variant"] == name]
        lengths = [result["accept_len"] for result in mine]
        entry: dict[str, Any] = {
            "overrides": list(overrides),
            "seeds": [result["seed"] for result in mine],
            "accept_len": sum(lengths) / len(lengths) if lengths else None,
            "accept_lens": lengths,
            "per_position_acceptance": _mean_rows([result["per_position_acceptance"] for result in mine]),
            "curve": _mean_curve([result["curve"] for result in mine]),
            "difference": None,
        }
        if name != baseline and runs[name].keys() & runs[baseline].keys():
            found = paired_difference(runs[baseline], runs[name])
            entry["difference"] = {"value": found.value, "low": found.low, "high": found.high, "pairs": found.pairs}
        entries[name] = entry
    return {
        "baseline": baseline,
        "variants": entries,
        "heldout_samples": len(results[0]["rounds"]) if results else 0,
        "steps": sorted({result["step"] for result in results}),
    }


def write_ablation(directory: Path, comparison: Mapping[str, Any]) -> None:
    """Writes ablation.json, ablation.md and ablation.html, each complete or absent."""
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_json(directory / "ablation.json", comparison)
    atomic_write_text(directory / "ablation.md", render_ablation_markdown(comparison))
    atomic_write_text(directory / "ablation.html", render_ablation_html(comparison))


def render_ablation_table(comparison: Mapping[str, Any]) -> str:
    """Aligned plain text."""
    return aligned([_COLUMNS, *_rows(comparison)]) + "\n\n" + "\n".join(f"- {note}" for note in _notes(comparison))


def render_ablation_markdown(comparison: Mapping[str, Any]) -> str:
    """A Markdown table with what each variant changes."""
    lines = [" | ".join(_COLUMNS), " | ".join(["---", *["---:"] * (len(_COLUMNS) - 1)])]
    lines += [" | ".join(row) for row in _rows(comparison)]
    changes = [
        f"- `{name}`: {', '.join(f'`{override}`' for override in entry['overrides']) or 'the settings as they are'}"
        for name, entry in comparison["variants"].items()
    ]
    table = "\n".join(f"| {line} |" for line in lines)
    return "\n\n".join([table, "\n".join(changes), "\n".join(f"- {note}" for note in _notes(comparison))]) + "\n"


def render_ablation_html(comparison: Mapping[str, Any]) -> str:
    """One page that loads nothing from elsewhere."""
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(comparison["variants"])}
    return render_page(
        "ablation",
        comparison=comparison,
        columns=_COLUMNS,
        rows=_rows(comparison),
        notes=_notes(comparison),
        colours=colours,
        dots=_dots(comparison),
        curves=_curves(comparison),
        raw=json.dumps(comparison, indent=1),
    )


def _rows(comparison: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, entry in comparison["variants"].items():
        lengths, difference = entry["accept_lens"], entry["difference"]
        rows.append(
            (
                name,
                str(len(lengths)),
                number(entry["accept_len"], 3),
                number(min(lengths, default=None), 3),
                number(max(lengths, default=None), 3),
                _percent(difference["value"]) if difference else "–",
                f"{_percent(difference['low'])} to {_percent(difference['high'])}" if difference else "–",
            )
        )
    return rows


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    notes = []
    if comparison["steps"]:
        steps = " or ".join(str(count) for count in comparison["steps"])
        notes = [
            f"{steps} steps per run, same rollouts; runs of one seed see the samples in the same order. Accept length "
            f"is walked over {comparison['heldout_samples']} held-out samples, which chose no checkpoint, and counts "
            "the target's own token.",
            f"Differences are to {comparison['baseline']}, of runs with the same seed; the interval is a bootstrap "
            "over seeds and samples. With few seeds it is too narrow rather than too wide.",
        ]
    if comparison.get("missing"):
        notes.append(f"Not finished: {', '.join(comparison['missing'])}.")
    return notes


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _mean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)] if _same_length(rows) else []


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """Point by point; curves of other lengths, from runs of other step counts, are left out."""
    if not curves:
        return []
    alike = [curve for curve in curves if len(curve) == len(curves[0])]
    return [(int(points[0][0]), sum(point[1] for point in points) / len(points)) for points in zip(*alike, strict=True)]


def _same_length(rows: Sequence[Sequence[float]]) -> bool:
    return bool(rows) and len({len(row) for row in rows}) == 1


def _dots(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Accept lengths on a common axis: for every variant the share of the width of each run and of the mean."""
    lengths = [value for entry in comparison["variants"].values() for value in entry["accept_lens"]]
    low, high = _axis(lengths)
    return {
        "low": low,
        "high": high,
        "rows": {
            name: {
                "runs": [(value - low) / (high - low) for value in entry["accept_lens"]],
                "mean": None if entry["accept_len"] is None else (entry["accept_len"] - low) / (high - low),
            }
            for name, entry in comparison["variants"].items()
        },
    }


def _curves(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """SVG polyline points of the learning curves in a box of 1 by 1, origin above."""
    points = [point for entry in comparison["variants"].values() for point in entry["curve"]]
    low, high = _axis([value for _, value in points])
    last = max((step for step, _ in points), default=1)
    return {
        "low": low,
        "high": high,
        "last": last,
        "lines": {
            name: [(step / last, (high - value) / (high - low)) for step, value in entry["curve"]]
            for name, entry in comparison["variants"].items()
        },
    }


def _axis(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 1.0, 2.0
    margin = 0.05 * (max(values) - min(values)) or 0.05
    return min(values) - margin, max(values) + margin
