import json
import re

import pytest

from tests.support.scripted_methods import trials_of
from tierspec.evaluation.comparison import summarise
from tierspec.evaluation.report import notes, render_html, render_table, write_report


@pytest.fixture
def report():
    trials, _ = trials_of()
    difference = {"set": "chat", "method": "transformers", "prompt_id": "p<2>", "position": 79, "top2_gap": 0.5}
    sets = {"chat": summarise(trials, [], invariant=True), "code & more": summarise(trials[:1], [], invariant=True)}
    return {
        "target": "embedded:tiny",
        "device": "cpu",
        "dtype": "bfloat16",
        "numerics": "invariant",
        "machine": "a laptop",
        "threads": 2,
        "versions": {"torch": "2"},
        "created": "today",
        "git": None,
        "drafter": "runs/x/drafter",
        "sets": sets,
        "geomean": {"autoregressive": 1.0, "suffix": 3.0, "transformers": 0.4},
        "geomean_non_looping": {"autoregressive": 1.0, "suffix": 3.0},
        "looping": {"chat": 1, "code & more": 1},
        "checkpoint_prompts": {"left_out": 24, "measured": 0},
        "differences": [difference],
        "protocol": {"batch": 1, "repeats": 3, "max_new_tokens": 80, "temperature": 0.0},
    }


def test_the_page_loads_nothing_and_escapes_what_it_shows(report):
    page = render_html(report)
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|<script|<link""", page)
    assert "p&lt;2&gt;" in page and "p<2>" not in page and "code &amp; more" in page
    assert "EAGLE-3" not in page and "transformers" in page
    assert page.count("<svg") == 2
    assert all(note.split(" (")[0].replace("'", "&#39;") in page for note in notes(report))


def test_the_table_has_a_row_per_method_and_the_means(report):
    lines = render_table(report).splitlines()
    assert "chat: 2 prompts, 1 looping" in lines
    row = next(line.split() for line in lines if line.strip().startswith("suffix cache"))
    assert row == ["suffix", "cache", "80.0", "3.00", "3.00", "3.00", "2/2"]
    assert "geometric mean of speedups" in lines


def test_files_are_written_and_json_is_strict(report, tmp_path):
    page = write_report(tmp_path / "report", report)
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == json.loads(json.dumps(report))


def test_prompts_that_chose_the_checkpoint_are_named(report):
    assert any(note.startswith("Left out: 24 ") for note in notes(report))
    report["checkpoint_prompts"] = {"left_out": 0, "measured": 3}
    assert any(note.startswith("3 of these prompts") for note in notes(report))


def test_few_repeats_are_called_an_indication(report):
    report["protocol"]["repeats"] = 1
    assert any("indication" in note for note in notes(report))


def test_a_report_stopped_before_its_first_prompt(report):
    report |= {"sets": {}, "geomean": {}, "geomean_non_looping": {}, "looping": {}, "differences": []}
    assert "None: every method gave the same tokens" not in render_html(report)
    assert render_table(report).startswith("- embedded:tiny")
