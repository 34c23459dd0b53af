"""`jobs.evaluate` on the tiny model; it needs no Ray, but stands beside the other jobs."""

import json
from pathlib import Path

import pytest

from jobs import evaluate
from jobs.command import execute
from tests.support.target_drafters import write_untrained_drafter

PRESET = Path(__file__).parents[2] / "configs" / "tiny.yaml"


@pytest.fixture
def arguments(tmp_path, tiny_target):
    drafter = write_untrained_drafter(tmp_path / "drafter", tiny_target, draft_vocab_size=256)
    return ["--config", str(PRESET), f"run.root={tmp_path / 'runs'}", f"serve.drafter={drafter}"]


def test_a_report_with_its_provenance(arguments, tmp_path, capsys):
    assert execute("evaluate", evaluate.main, [*arguments, "evaluation.prompts=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    report = tmp_path / "runs" / "tiny" / "report"
    assert {"report.json", "report.html", "result.json", "run.yaml", "command.txt"} <= {
        p.name for p in report.iterdir()
    }
    assert result["sets"]["builtin"]["eagle3"]["lossless"] and result["page"] == str(report / "report.html")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            "serve.drafter=null",
            "run jobs.train first, or name another in serve.drafter, or leave neural and auto out",
        ),
        ("prompts.heldout=[nowhere.jsonl]", "prompts.heldout: nowhere.jsonl matches no file"),
        ("evaluation.methods=[suffix]", "evaluation.methods lacks 'autoregressive'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, tmp_path, capsys, setting, complaint):
    assert execute("evaluate", evaluate.main, [*arguments, setting]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and complaint in error
    assert not (tmp_path / "runs").exists()


def test_a_prompt_beyond_the_context_is_named(arguments, tmp_path, capsys):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"id": "too-long", "prompt": "word " * 3000}) + "\n")
    assert execute("evaluate", evaluate.main, [*arguments, f"prompts.heldout=['{long}']"]) == 2
    assert "prompts.heldout: too-long of long has" in capsys.readouterr().err


def test_the_last_turn_is_asked_after_the_targets_own_answers(arguments, tmp_path, capsys):
    talks = tmp_path / "talks.jsonl"
    talks.write_text("".join(json.dumps({"id": str(i), "turns": ["one"] * (i + 1)}) + "\n" for i in range(3)))
    asked = [*arguments, f"prompts.heldout=['{talks}']", "evaluation.methods=[autoregressive, suffix]", "--json"]
    lengths = []
    for turn in ("first", "last"):
        assert execute("evaluate", evaluate.main, [*asked, f"evaluation.turn={turn}"]) == 0
        entry = json.loads(capsys.readouterr().out.splitlines()[-1])["sets"]["talks"]["suffix"]
        assert (entry["prompts"], entry["lossless"]) == (3, True)
        lengths.append(entry["verifier_calls"])
    assert lengths[0] != lengths[1]
