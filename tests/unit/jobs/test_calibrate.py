import json
from pathlib import Path

import pytest

from jobs import calibrate
from jobs.command import execute
from tests.support.target_drafters import write_untrained_drafter
from tierspec.models import Target

PRESET = Path(__file__).parents[3] / "configs" / "tiny.yaml"
GRID = ("calibration.max_tokens=[2,3,4,9]", "calibration.min_survival=[0.0,0.9]", "calibration.prompts=2")
SHORT = ("calibration.repeats=1", "calibration.max_new_tokens=16")


def arguments(folder: Path, target: Target, survival_bias: float | None) -> list[str]:
    drafter = write_untrained_drafter(folder / "drafter", target, draft_vocab_size=256, survival_bias=survival_bias)
    return ["--config", str(PRESET), f"run.root={folder / 'runs'}", f"serve.drafter={drafter}", *GRID, *SHORT]


def test_every_pair_is_measured_and_the_present_one_comes_first(
    tmp_path: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute("calibrate", calibrate.main, [*arguments(tmp_path, tiny_target, 0.0), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["present"] == "draft.max_tokens=3 draft.min_survival=0"
    names = [candidate["setting"] for candidate in result["candidates"]]
    assert names[0] == result["present"] and result["fastest"] in names
    assert set(names) == {f"draft.max_tokens={k} draft.min_survival={p}" for k in (2, 3) for p in ("0", "0.9")}
    drafted = {candidate["setting"]: candidate["drafted_per_round"] for candidate in result["candidates"]}
    assert drafted["draft.max_tokens=2 draft.min_survival=0.9"] == 0
    assert 0 < drafted["draft.max_tokens=2 draft.min_survival=0"] <= 2
    folder = tmp_path / "runs" / "tiny" / "calibration"
    assert json.loads((folder / "result.json").read_text()) == result
    assert len(result["prompts"]) == 2 and (folder / "run.yaml").exists()


def test_prompts_that_chose_the_checkpoint_are_used(
    tmp_path: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, tiny_target, 0.0)
    prompts = tmp_path / "heldout.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"h{n}", "prompt": f"Question {n}?"}) + "\n" for n in range(5)))
    (tmp_path / "drafter" / "metrics.json").write_text(json.dumps({"heldout": {"samples": ["h3"]}}))
    assert execute("calibrate", calibrate.main, [*given, f"prompts.heldout=[{prompts}]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompts"] == ["h3"]


def test_bad_input_is_one_line(tmp_path: Path, tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path, tiny_target, None)
    for more, line in (
        ([], "calibration.min_survival: "),
        (["serve.drafter=auto"], "holds no neural drafter; run jobs.train first"),
        (["prompts.heldout=[nowhere.jsonl]"], "prompts.heldout: nowhere.jsonl matches no file"),
        (["calibration.min_survival=[0]", "calibration.max_new_tokens=100000"], "calibration.max_new_tokens = 100000"),
    ):
        assert execute("calibrate", calibrate.main, [*given, *more]) == 2
        error = capsys.readouterr().err.splitlines()
        assert line in error[-1] and len(error) == 1
    assert execute("calibrate", calibrate.main, [*given, "calibration.min_survival=[0]"]) == 0
