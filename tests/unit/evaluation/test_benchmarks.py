import json
import sys
from pathlib import Path

import pytest

from benchmarks import decode, gpu, training

pytestmark = pytest.mark.slow
TINY = Path(__file__).parents[3] / "configs" / "tiny.yaml"


def test_gpu_benchmark_runs_anywhere(monkeypatch, tmp_path):
    output = tmp_path / "gpu.json"
    arguments = ["gpu", "--device", "cpu", "--size", "tiny", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu.main() == 0
    result = json.loads(output.read_text())
    assert result["parity"]["passed"] and result["parity"]["fp32_max_logit_difference"] <= 1e-4
    assert set(result["verify_ms"]) == {str(n) for n in gpu.BLOCKS}
    assert result["step"]["bytes"] == 2 * (4 * (64 * 16 * 12 + 3 * 64 * 128 + 2 * 512 * 32) + 512 * 64)


def test_decode_benchmark_measures_all_three_parts(monkeypatch, tmp_path):
    output = tmp_path / "decode.json"
    sizes = ["--repeats", "1", "--new-tokens", "4", "--step-prompts", "1", "--batch-prompts", "3", "--slots", "2"]
    target = ["--target", "embedded:tiny", "--dtypes", "float32"]
    monkeypatch.setattr(sys, "argv", ["decode", *target, *sizes, "--output", str(output)])
    decode.main()
    measured = json.loads(output.read_text())["float32"]
    assert set(measured) == {"numerics", "step", "verify", "batch"}
    assert measured["step"]["speedup"] > 0 and measured["batch"]["prompts"] == 3


def test_training_benchmark_measures_all_three_parts(monkeypatch, tmp_path):
    output = tmp_path / "training.json"
    sizes = ["--repeats", "1", "--vocabulary", "512", "--tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["training", "--config", str(TINY), *sizes, "--output", str(output)])
    training.main()
    measured = json.loads(output.read_text())
    assert measured["roofline"]["products_seconds"] > 0 and measured["roofline"]["products"] > 20
    assert set(measured["memory"]["mib"]) == {"whole", "chunked"}
    assert measured["bucketing"]["gain"] > 1
