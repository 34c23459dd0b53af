import json

from pipelines.evaluation import evaluate
from tierspec.config import load_settings

METHODS = {"autoregressive", "suffix", "eagle3", "suffix_or_neural", "transformers", "transformers_prompt_lookup"}
ENTRY = {"tokens", "seconds", "tokens_per_s", "speedup", "accept_len", "per_position_acceptance", "verifier_calls"}
ENTRY |= {"drafter_seconds", "verifier_seconds", "lossless", "identical", "prompts", "looping", "non_looping"}
HEADER = {"target", "device", "dtype", "threads", "versions", "sets", "geomean", "geomean_non_looping"}


def test_a_report_of_the_real_model(drafter_path, tmp_path):
    lines = ["Name three rivers in Africa.", "Count from one to ten in words."]
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [line]}) + "\n" for line in lines))
    overrides = [f"serve.drafter={drafter_path}", f"prompts.heldout=['{prompts}', 'builtin:heldout']"]
    small = ["evaluation.max_new_tokens=16", "evaluation.repeats=1", "evaluation.prompts=1"]
    report = evaluate(load_settings(None, overrides + small), tmp_path / "report")

    assert report.keys() >= HEADER
    assert set(report["sets"]) == {"questions", "builtin"} and report["complete"]
    for entries in report["sets"].values():
        assert entries.keys() == METHODS
        for name, entry in entries.items():
            assert entry.keys() >= ENTRY
            if not name.startswith("transformers"):
                assert entry["lossless"] and entry["identical"] == entry["prompts"] == 1
    assert report["geomean"]["autoregressive"] == 1.0
    assert json.loads((tmp_path / "report" / "report.json").read_text())["sets"] == report["sets"]
    assert json.loads((tmp_path / "report" / "result.json").read_text())["geomean"] == report["geomean"]
    assert "</html>" in (tmp_path / "report" / "report.html").read_text()
