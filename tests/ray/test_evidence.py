import json

from tests.evidence.__main__ import is_current, measure
from tests.evidence.losslessness import CELLS, run_matrix
from tests.support.target_drafters import write_untrained_drafter


def test_the_matrix_runs_resumes_and_starts_anew(tiny_target, tmp_path):
    drafter = write_untrained_drafter(tmp_path / "drafter", tiny_target, draft_vocab_size=256)
    output, lines = tmp_path / "losslessness.json", []
    cells = [cell for cell in CELLS if cell.dtype == "float32" and cell.batch == 8]
    arguments = {"target": "embedded:tiny", "prompts": 3, "new_tokens": 12, "log": lines.append}
    few = [cell for cell in cells if cell.placement == "colocated"]
    run_matrix(drafter, output, cells=few, **arguments)
    assert len(lines) == len(few) == 6

    result = run_matrix(drafter, output, cells=cells, **arguments)
    assert len(lines) == len(cells) == 12
    assert result["passed"] and result == json.loads(output.read_text())
    assert all(entry["identical"] == entry["prompts"] == 3 for entry in result["cells"].values())

    run_matrix(drafter, output, cells=few[:1], **arguments | {"new_tokens": 4})
    assert list(json.loads(output.read_text())["cells"]) == [few[0].name]


def test_a_benchmark_that_fails_leaves_the_older_result_as_it_was(tmp_path):
    output = tmp_path / "result.json"
    output.write_text('{"sources_sha256": "older"}')
    assert not measure("decode", ["--target", "nowhere"], output, "newer")
    assert json.loads(output.read_text()) == {"sources_sha256": "older"}
    assert not is_current(output, fresh=False)
