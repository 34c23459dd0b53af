"""The report of an evaluation: report.json for machines, one self-contained page and a table for people."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierspec.artifacts import atomic_write_json, atomic_write_text
from tierspec.evaluation.page import render_page

METHOD_LABELS = {
    "autoregressive": "autoregressive",
    "suffix": "suffix cache",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "suffix_or_neural": "suffix or neural",
    "hybrid_match": "rule: match",
    "hybrid_score": "rule: score",
    "hybrid_first": "rule: suffix first",
    "hvd_fixed": "HVD fixed",
    "hvd_cost": "HVD cost",
    "oracle": "oracle",
    "transformers": "transformers",
    "transformers_prompt_lookup": "transformers, prompt lookup",
}
COLUMNS = ("method", "tokens/s", "speedup", "not looping", "accept len", "identical")


def write_report(directory: Path, report: dict[str, Any]) -> Path:
    """Writes report.json and report.html into `directory`, each complete or absent, and returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_json(directory / "report.json", report)
    page = directory / "report.html"
    atomic_write_text(page, render_html(report))
    return page


def render_html(report: dict[str, Any]) -> str:
    """The report as one HTML page that loads nothing from elsewhere."""
    filters: dict[str, Callable[..., str]] = {"number": number, "label": label}
    return render_page("report", filters, report=report, notes=notes(report), raw=json.dumps(report, indent=1))


def render_table(report: dict[str, Any]) -> str:
    """The report as aligned plain text, one block per prompt set and one for the geometric means."""
    blocks = []
    for name, methods in report["sets"].items():
        prompts = next(iter(methods.values()))["prompts"] if methods else 0
        rows = [_row(method, entry) for method, entry in methods.items()]
        looping = report["looping"].get(name, 0)
        blocks.append(f"{name}: {prompts} prompts, {looping} looping\n" + aligned([COLUMNS, *rows]))
    if len(report["sets"]) > 1:
        means = [
            (label(method), number(value), number(report["geomean_non_looping"].get(method)))
            for method, value in report["geomean"].items()
        ]
        blocks.append("geometric mean of speedups\n" + aligned([("method", "all", "not looping"), *means]))
    small_print = "\n".join(
        textwrap.fill(note, 118, initial_indent="- ", subsequent_indent="  ") for note in notes(report)
    )
    return "\n\n".join([*blocks, small_print])


def notes(report: dict[str, Any]) -> list[str]:
    """What a reader must know to judge the numbers, one sentence or two each."""
    protocol = report["protocol"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{report['target']} in {report['dtype']} on {report['device']} ({report['machine']}), "
        f"{report['threads']} threads, {report['numerics']} numerics; {versions}.",
        f"Batch {protocol['batch']}, one process, methods alternated per prompt, median of {protocol['repeats']} "
        f"run{'s' * (protocol['repeats'] > 1)} after a warm-up; up to {protocol['max_new_tokens']} new tokens at "
        f"temperature {protocol['temperature']:g}. "
        "Seconds include the prompt's prefill.",
        "Speedup is tokens per second over `autoregressive`, which is this project's own runtime without drafts, its "
        "fastest path with the same numerics.",
        "An output loops if some period of at most 32 tokens repeats over at least 64; looping prompts flatter "
        "drafts that copy, so the column 'not looping' leaves them out.",
        "Timings on a shared machine vary: differences of a few percent mean nothing.",
    ]
    if any(method.startswith("transformers") for entries in report["sets"].values() for method in entries):
        lines.append("The transformers rows ran in the same process with the same weights.")
    if report.get("drafter"):
        lines.append(f"Drafter: {report['drafter']}.")
    chose = report["checkpoint_prompts"]
    if chose["left_out"]:
        lines.append(f"Left out: {chose['left_out']} held-out prompts by which the drafter's checkpoint was chosen.")
    if chose["measured"]:
        lines.append(f"{chose['measured']} of these prompts also chose the drafter's checkpoint, which flatters it.")
    if protocol["repeats"] < 3:
        lines.append("Fewer than three repeats: these speeds are an indication, not a measurement.")
    return lines


def label(method: str) -> str:
    return METHOD_LABELS.get(method, method)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _row(method: str, entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        label(method),
        number(entry["tokens_per_s"], 1),
        number(entry["speedup"]),
        number(entry["non_looping"]["speedup"]),
        number(entry["accept_len"]),
        f"{entry['identical']}/{entry['prompts']}",
    )


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells as text, the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
