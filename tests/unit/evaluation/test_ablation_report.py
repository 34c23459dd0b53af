import json
import re

import pytest

from tierspec.evaluation.ablation import compare_variants, render_ablation_table, write_ablation


def result(variant: str, seed: int, accepted: int) -> dict:
    rounds = [10, 20, 30, 40]
    return {
        "variant": variant,
        "seed": seed,
        "step": 50,
        "accept_len": 1 + 4 * accepted / 100,
        "per_position_acceptance": [0.5, 0.4],
        "rounds": rounds,
        "accepted": [accepted] * 4,
        "curve": [(25, 1.2), (50, 1.0 + accepted / 25)],
    }


@pytest.fixture
def comparison() -> dict:
    variants = {"base": ["training.objective=eagle3"], "vat": ["training.objective=vat"], "<late>": []}
    results = [result("base", 0, 10), result("vat", 0, 12), result("base", 1, 11)]
    found = compare_variants(variants, "base", results)
    return found | {
        "missing": ["vat-seed1"],
        "environment": {"created": "today", "machine": "a laptop", "git": None},
    }


def test_means_and_differences(comparison: dict) -> None:
    base, vat, late = (comparison["variants"][name] for name in ("base", "vat", "<late>"))
    assert base["accept_len"] == pytest.approx(1.42) and base["seeds"] == [0, 1] and base["difference"] is None
    assert vat["difference"]["pairs"] == 1
    assert vat["difference"]["value"] == pytest.approx(1.48 / 1.4 - 1)
    assert late["accept_len"] is None and late["difference"] is None
    assert base["curve"] == [(25, pytest.approx(1.2)), (50, pytest.approx(1.42))]


def test_the_table_shows_what_is_there_and_what_is_missing(comparison: dict) -> None:
    table = render_ablation_table(comparison)
    row = next(line.split() for line in table.splitlines() if line.strip().startswith("vat"))
    assert row[:6] == ["vat", "1", "1.480", "1.480", "1.480", "+5.7"]
    assert "Not finished: vat-seed1." in table


def test_the_page_loads_nothing_and_escapes_what_it_shows(comparison: dict, tmp_path) -> None:
    write_ablation(tmp_path / "ablation", comparison)
    page = (tmp_path / "ablation" / "ablation.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|<script|<link""", page)
    assert "&lt;late&gt;" in page and "<late>" not in page
    assert page.count("<svg") == 2 and page.count("<circle") == 3
    assert json.loads((tmp_path / "ablation" / "ablation.json").read_text())["missing"] == ["vat-seed1"]
    assert "| vat | 1 | 1.480 |" in (tmp_path / "ablation" / "ablation.md").read_text()


def test_nothing_finished_is_still_a_report(tmp_path) -> None:
    found = compare_variants({"base": []}, "base", [])
    write_ablation(
        tmp_path, found | {"missing": ["base-seed0"], "environment": {"created": "", "machine": "", "git": ""}}
    )
    assert (tmp_path / "ablation.html").exists()
