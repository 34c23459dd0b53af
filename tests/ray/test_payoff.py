"""The payoff job on a real local Ray, and the routers that ask what it made, on the tiny target."""

import json
from pathlib import Path

import pytest

from jobs import evaluate, payoff
from jobs.command import execute
from tests.support.rollouts import write_tiny_rollouts
from tests.support.target_drafters import write_untrained_drafter

PRESET = Path(__file__).parents[2] / "configs" / "tiny.yaml"
ROUTERS = ["autoregressive", "hybrid_match", "hybrid_score", "hybrid_first", "hvd_fixed", "hvd_cost", "oracle"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, tiny_target):
    root = tmp_path_factory.mktemp("payoff")
    write_tiny_rollouts(root / "runs" / "tiny" / "rollouts" / "train", tiny_target, count=30, seed=1, tokens=32)
    drafter = write_untrained_drafter(root / "drafter", tiny_target, draft_vocab_size=256)
    return ["--config", str(PRESET), f"run.root={root / 'runs'}", f"serve.drafter={drafter}", "payoff.threshold=1"]


def test_a_predictor_is_trained_twice_to_the_same_bytes_and_routes(arguments, capsys):
    folder = Path(arguments[2].partition("=")[2]) / "tiny" / "payoff"
    weights = []
    for _ in range(2):
        assert execute("payoff", payoff.main, [*arguments, "payoff.leave_one_out=true", "--json"]) == 0
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert metrics["learned_history"]["rows"] > metrics["learned_history_at_rounds"]["rows"] > 0
    assert {"config.json", "result.json", "run.yaml"} <= {path.name for path in folder.iterdir()}

    chosen = [*arguments, f"evaluation.methods={json.dumps(ROUTERS)}", "evaluation.prompts=2", "--json"]
    assert execute("evaluate", evaluate.main, chosen) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    entries = report["sets"]["builtin"]
    assert set(entries) == set(ROUTERS) and all(entry["lossless"] for entry in entries.values())

    changed = [*chosen, "draft.suffix.factor=3"]
    assert execute("evaluate", evaluate.main, changed) == 2
    assert "draft.suffix.factor is 3.0, but the payoff predictor" in capsys.readouterr().err


def test_without_rollouts_or_predictor_it_is_one_line(arguments, tmp_path, capsys):
    elsewhere = [*arguments, f"run.root={tmp_path / 'runs'}"]
    assert execute("payoff", payoff.main, elsewhere) == 2
    assert "run jobs.rollout first" in capsys.readouterr().err
    assert execute("evaluate", evaluate.main, [*elsewhere, "evaluation.methods=[autoregressive, hvd_cost]"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "holds no payoff predictor; run jobs.payoff first" in error
    assert not (tmp_path / "runs").exists()
