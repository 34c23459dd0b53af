"""`python -m tests.evidence`: runs the full matrices and writes docs/results/*.json with commit and versions.

Interrupted, it continues with the parts, and the cells of the matrix, that are missing. Exit status 1 if a claim fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.evidence import keyed_rule
from tests.evidence.losslessness import CELLS, run_matrix
from tests.evidence.sources import sources_sha256
from tierspec.artifacts import atomic_write_json
from tierspec.evaluation.environment import describe_environment

PARTS = ("losslessness", "keyed_rule", "decode", "training")
LEAST_P_VALUE = 1e-4
BENCHMARK_SOURCES = {
    "decode": ("benchmarks/decode.py", "benchmarks/timing.py"),
    "training": (
        "benchmarks/training.py",
        "benchmarks/timing.py",
        "configs/smollm2-135m.yaml",
        "tierspec/settings",
        "tierspec/training",
    ),
}
ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; none runs all")
    parser.add_argument("--drafter", type=Path, default=ROOT / "runs" / "smollm2-135m" / "drafter")
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--cells", default="", help="only cells of the matrix whose name contains this")
    parser.add_argument("--fresh", action="store_true", help="repeat what is there already")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))} (there are {', '.join(PARTS)})")
    parts = options.parts or PARTS
    if "losslessness" in parts and not (options.drafter / "config.json").is_file():
        parser.error(f"--drafter: {options.drafter} holds no drafter; train one with `make demo`, or name one")
    options.output.mkdir(parents=True, exist_ok=True)

    passed = True
    if "losslessness" in parts:
        result = run_matrix(
            options.drafter,
            options.output / "losslessness.json",
            target=options.target,
            prompts=options.prompts,
            new_tokens=options.new_tokens,
            cells=[cell for cell in CELLS if options.cells in cell.name],
            fresh=options.fresh,
        )
        passed &= result["passed"]
    if "keyed_rule" in parts:
        passed &= check_keyed_rule(options.output / "keyed_rule.json", options.fresh)
    for name, arguments in (("decode", ["--target", options.target]), ("training", [])):
        output, sources = options.output / f"{name}.json", BENCHMARK_SOURCES[name]
        if name in parts and not is_current(output, options.fresh, *sources):
            passed &= measure(name, arguments, output, sources_sha256(*sources))
    print("all claims hold" if passed else "a claim FAILED")
    return 0 if passed else 1


def check_keyed_rule(output: Path, fresh: bool) -> bool:
    """The keyed choice against the target's distribution over 1e6 seeds; true if no p-value is suspicious."""
    if not is_current(output, fresh):
        tests = keyed_rule.main()
        header = describe_environment() | {"sources_sha256": sources_sha256()}
        atomic_write_json(output, header | {"tests": tests})
    tests = json.loads(output.read_text(encoding="utf-8"))["tests"]
    for name, test in tests.items():
        print(
            f"keyed rule, {name}: {test['rows']} rows, chi-square {test['chi_square']:.1f}, p = {test['p_value']:.3f}"
        )
    return all(test["p_value"] >= LEAST_P_VALUE for test in tests.values())


def measure(name: str, arguments: list[str], output: Path, sources: str) -> bool:
    """A benchmark, in a process of its own, so that nothing else holds memory or threads. Unless it passes, `output`
    stays as it was."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--output", str(made)]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            return False
        result = json.loads(made.read_text(encoding="utf-8"))
    atomic_write_json(output, result | {"sources_sha256": sources})
    return True


def is_current(output: Path, fresh: bool, *more: str) -> bool:
    """Whether `output` is a result of these sources, the folders and files `more` among them."""
    if fresh or not output.is_file():
        return False
    return bool(json.loads(output.read_text(encoding="utf-8")).get("sources_sha256") == sources_sha256(*more))


if __name__ == "__main__":
    sys.exit(main())
