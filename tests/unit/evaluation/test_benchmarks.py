import json
import sys

import pytest

from benchmarks import decode, gpu

pytestmark = pytest.mark.slow


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
