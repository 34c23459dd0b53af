import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
METHODS = {"autoregressive", "suffix", "eagle3", "suffix_or_neural", "transformers", "transformers_prompt_lookup"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def demo(folder: Path, heldout: Path) -> tuple[dict, str]:
    """Runs the demo on the tiny preset; its result and its standard error."""
    settings = [f"run.root={folder}", f"serve.port={free_port()}", f"prompts.heldout=['{heldout}']", "prompts.limit=8"]
    command = [sys.executable, "-m", "jobs.demo", "--config", "configs/tiny.yaml", "--json", *settings]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_whole_line_and_again_without_repeating_it(tmp_path):
    heldout = tmp_path / "questions.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": f"What is {n} plus {n}?"}) + "\n" for n in range(4)))
    result, shown = demo(tmp_path / "runs", heldout)
    assert result["geomean"].keys() == METHODS
    assert sum(result["answer"]["tokens_by_source"].values()) > 0
    assert result["rollout_tokens"] > 0 and result["peak_memory_gib"] > 0
    assert Path(result["report"]).is_file() and result["report"] in shown
    assert [f"[{step}/4]" in shown for step in range(1, 5)] == [True] * 4
    for stage in ("rollouts", "drafter", "report"):
        assert {"run.yaml", "command.txt", "result.json"} <= {
            p.name for p in (tmp_path / "runs/tiny" / stage).iterdir()
        }

    report = Path(result["report"]).with_name("report.json")
    written = report.stat().st_mtime_ns, (tmp_path / "runs/tiny/drafter/model.safetensors").stat().st_mtime_ns
    again, _ = demo(tmp_path / "runs", heldout)
    assert again["geomean"] == result["geomean"] and again["answer"] == result["answer"]
    assert written == (report.stat().st_mtime_ns, (tmp_path / "runs/tiny/drafter/model.safetensors").stat().st_mtime_ns)
