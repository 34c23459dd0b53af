import json
import os
import subprocess
import sys

import pytest
import yaml

from tierspec import artifacts
from tierspec.errors import ArtifactError, SettingError

GONE = 2**22 + 1  # above the kernel's largest process id


def test_a_stage_is_stamped_with_its_origin(tiny_settings, tmp_path):
    directory = artifacts.run_directory(tiny_settings, "rollouts")
    assert directory == tmp_path / "runs" / "tiny" / "rollouts"
    assert not directory.exists()
    artifacts.write_provenance(directory, tiny_settings, ["python", "-m", "jobs.rollout", "run.name=a b"])
    assert yaml.safe_load((directory / "run.yaml").read_text())["run"]["name"] == "tiny"
    assert (directory / "command.txt").read_text() == "python -m jobs.rollout 'run.name=a b'\n"
    stamp = json.loads((directory / "versions.json").read_text())
    assert stamp["versions"]["torch"].startswith("2.")
    assert set(stamp) == {"git", "versions"}


def test_a_root_that_cannot_be_made_is_one_line(tiny_settings, tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(SettingError, match=r"cannot write to .*setting run\.root"):
        artifacts.write_provenance(artifacts.run_directory(tiny_settings, "drafter"), tiny_settings, [])


def test_writing_a_file_replaces_it_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "result.json"
    artifacts.atomic_write_json(file, {"a": 1})
    artifacts.atomic_write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_a_value_json_cannot_hold_leaves_the_old_file(tmp_path):
    file = tmp_path / "result.json"
    artifacts.atomic_write_json(file, {"a": 1})
    with pytest.raises(ValueError, match="nan"):
        artifacts.atomic_write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    final = tmp_path / "model"
    with artifacts.atomic_directory(final) as unfinished:
        (unfinished / "first").write_text("1")
        assert not final.exists()
    with pytest.raises(RuntimeError), artifacts.atomic_directory(final) as unfinished:
        (unfinished / "second").write_text("2")
        raise RuntimeError
    assert [path.name for path in final.iterdir()] == ["first"]
    with artifacts.atomic_directory(final) as unfinished:
        (unfinished / "third").write_text("3")
    assert [path.name for path in final.iterdir()] == ["third"]
    assert list(tmp_path.iterdir()) == [final]


def test_leftovers_of_dead_processes_are_swept_and_nothing_else(tmp_path):
    stage = tmp_path / "drafter"
    (stage / "deep").mkdir(parents=True)
    dead = [
        stage / f".part.parquet.tmp-{GONE}-0123abcd",
        stage / "deep" / f".x.tmp-{GONE}-0123abcd",
        tmp_path / f".drafter.tmp-{GONE}-0123abcd",
    ]
    kept = [
        stage / f".part.parquet.tmp-{os.getpid()}-0123abcd",
        stage / f"part.tmp-{GONE}-0123abcd",
        tmp_path / f".rollouts.tmp-{GONE}-0123abcd",
    ]
    for path in (*dead[:2], *kept):
        path.write_text("x")
    dead[2].mkdir()
    assert sorted(artifacts.sweep_temporaries(stage)) == sorted(dead)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in kept)


def test_a_killed_writer_leaves_only_what_is_swept(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from tierspec.artifacts import atomic_directory\n"
        "with atomic_directory(Path(sys.argv[1])) as unfinished:\n"
        "    (unfinished / 'model.safetensors').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    final = tmp_path / "drafter"
    assert subprocess.run([sys.executable, "-c", code, str(final)], check=False).returncode == -9
    assert not final.exists()
    assert len(list(tmp_path.iterdir())) == 1
    artifacts.sweep_temporaries(final)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_names_need_free_and_setting(tmp_path):
    artifacts.require_disk(tmp_path / "not" / "yet" / "there", 1, "run.root")
    with pytest.raises(SettingError, match=r"^rollout needs about \d+\.0 GB in .* is free \(setting run\.root\)$"):
        artifacts.require_disk(tmp_path, 1e18, "run.root", what="rollout")


def test_json_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ArtifactError, match="cannot read .*a.json: No such file"):
        artifacts.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(ArtifactError, match="a.json is not valid JSON"):
        artifacts.read_json(tmp_path / "a.json")


def test_the_revision_is_the_checkouts_or_none(monkeypatch, tmp_path):
    monkeypatch.setattr(artifacts.tierspec, "__file__", str(tmp_path / "tierspec" / "__init__.py"))
    assert artifacts.git_revision() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert artifacts.git_revision() == head
