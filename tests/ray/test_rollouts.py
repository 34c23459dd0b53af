import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from pipelines.cluster import ray_session, worker_gpus
from pipelines.prompts import Prompt, read_prompts
from pipelines.rollouts import SCHEMA, check_rollouts, make_rollouts, read_rollouts
from pipelines.rollouts.pool import worker_cpus
from tierspec.config import Settings, load_settings
from tierspec.errors import SettingError

ROOT = Path(__file__).parents[2]
PROMPTS = [Prompt(f"p{n}", "test", tuple(f"Question {n}, turn {t}?" for t in range(1 + n % 2))) for n in range(60)]
ANSWERS = sum(len(prompt.turns) for prompt in PROMPTS)
HELDOUT = [Prompt("h0", "test", ("Something else entirely, please?",)), Prompt("h1", "test", ("And this?", "Why?"))]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(Settings()):
        yield


def settings_in(folder: Path) -> Settings:
    for name, prompts in (("train", PROMPTS), ("heldout", HELDOUT)):
        lines = "".join(json.dumps(prompt.to_json()) + "\n" for prompt in prompts)
        (folder / f"{name}.jsonl").write_text(lines)
    return load_settings(
        ROOT / "configs" / "tiny.yaml",
        [
            f"run.root={folder / 'runs'}",
            f"prompts.train=[{folder / 'train.jsonl'}]",
            f"prompts.heldout=[{folder / 'heldout.jsonl'}]",
            "prompts.limit=0",
            "rollout.shard_size=4",
            "rollout.temperature=0.7",
            "rollout.threads=1",
        ],
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training rollouts of an uninterrupted run with two workers."""
    folder = tmp_path_factory.mktemp("whole")
    make_rollouts(settings_in(folder).override("rollout.workers=2"), split="train", output=folder / "out")
    return folder / "out"


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return read_rollouts(directory).to_pylist()


def accounted(result: dict[str, Any]) -> bool:
    return result["done"] + result["failed"] + result["skipped"] == result["asked"]


def run_job(settings: Settings, tmp_path: Path, before: str) -> subprocess.CompletedProcess[str]:
    """The job in a process and a Ray of its own; `before` is Python that runs first."""
    preset = tmp_path / "settings.yaml"
    folder = tempfile.mkdtemp()  # a killed driver leaves its Ray's files
    preset.write_text(settings.override(f"ray.temp_dir={folder}").to_yaml())
    script = textwrap.dedent(before) + textwrap.dedent(
        f"""
        import sys
        from jobs.command import execute
        from jobs.rollout import main
        sys.exit(execute("rollout", main, ["--config", {str(preset)!r}, "--json"]))
        """
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=300)
    shutil.rmtree(folder, ignore_errors=True)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


AT_SHARD = """
import os, signal
replace, shards = os.replace, []
def replace_or_signal(source, target):
    if str(target).endswith(".parquet"):
        shards.append(target)
        if len(shards) == {count}:
            os.kill(os.getpid(), signal.{name})
    replace(source, target)
os.replace = replace_or_signal
"""


def test_training_rollouts_answer_every_prompt(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert (result["asked"], result["done"], result["ended_early"]) == (ANSWERS, ANSWERS, "")
    rows = read_rollouts(whole)
    assert rows.schema == SCHEMA
    assert result["tokens"] == sum(map(len, rows.column("response_ids").to_pylist()))
    used = read_prompts([str(whole / "prompts.jsonl")], "prompts.train")
    assert sorted(used, key=lambda prompt: prompt.sample_id) == sorted(PROMPTS, key=lambda prompt: prompt.sample_id)


def test_heldout_rollouts_are_greedy(settings: Settings, tmp_path: Path) -> None:
    result = make_rollouts(settings, split="heldout", output=tmp_path / "out")
    assert (result["asked"], result["done"]) == (3, 3)
    assert {row["temperature"] for row in rows_of(tmp_path / "out")} == {0.0}


def test_fewer_heldout_prompts_can_be_answered(settings: Settings, tmp_path: Path) -> None:
    some = settings.override("rollout.heldout_prompts=1")
    result = make_rollouts(some, split="heldout", output=tmp_path / "out")
    assert [row["sample_id"] for row in rows_of(tmp_path / "out")] == ["h0"]
    assert (result["asked"], result["prompts"]["over_limit"]) == (1, 1)
    with pytest.raises(SettingError, match=r"^rollout\.heldout_prompts is 2 now, but was 1 "):
        check_rollouts(settings.override("rollout.heldout_prompts=2"), split="heldout", output=tmp_path / "out")


def test_a_driver_killed_while_it_writes_is_taken_up_again(settings: Settings, tmp_path: Path, whole: Path) -> None:
    killed = run_job(settings, tmp_path, AT_SHARD.format(count=4, name="SIGKILL"))
    assert killed.returncode == -signal.SIGKILL
    directory = Path(settings.run.root) / settings.run.name / "rollouts" / "train"
    left = {path: path.stat().st_mtime_ns for path in directory.glob("shard-*.parquet")}
    assert len(left) == 3
    assert list(directory.glob(".shard-*.tmp-*"))

    resumed = make_rollouts(settings, split="train", output=directory)
    assert resumed["done"] == resumed["asked"] == ANSWERS
    assert not list(directory.glob(".shard-*.tmp-*"))
    assert {path: path.stat().st_mtime_ns for path in left} == left

    assert rows_of(directory) == rows_of(whole)


def test_the_first_interrupt_finishes_the_shards_under_way(settings: Settings, tmp_path: Path) -> None:
    stopped = run_job(settings, tmp_path, AT_SHARD.format(count=1, name="SIGINT"))
    assert stopped.returncode == 130, stopped.stderr
    result = json.loads(stopped.stdout.splitlines()[-1])
    assert accounted(result["train"]) and accounted(result["heldout"])
    assert result["heldout"]["skipped_by_reason"] == {"stopped": 3}
    rollouts = Path(settings.run.root) / settings.run.name / "rollouts"
    assert {"run.yaml", "command.txt", "result.json"} <= {path.name for path in rollouts.iterdir()}
    assert len(rows_of(rollouts / "train")) == result["train"]["done"] > 0


def test_a_token_budget_ends_early_and_a_larger_one_goes_on(settings: Settings, tmp_path: Path) -> None:
    first = make_rollouts(settings.override("rollout.token_budget=1"), split="train", output=tmp_path / "out")
    assert accounted(first) and first["done"] > 0
    again = make_rollouts(settings.override("rollout.token_budget=1"), split="train", output=tmp_path / "out")
    assert (again["done"], again["ended_early"]) == (first["done"], "token budget spent")
    assert make_rollouts(settings, split="train", output=tmp_path / "out")["done"] == ANSWERS


def test_a_stop_before_the_start_skips_everything(settings: Settings, tmp_path: Path) -> None:
    result = make_rollouts(settings, split="train", output=tmp_path / "out", stop=lambda: True)
    assert (result["done"], result["skipped_by_reason"]) == (0, {"stopped": ANSWERS})


def test_contaminated_and_repeated_prompts_are_counted(settings: Settings, tmp_path: Path) -> None:
    with (tmp_path / "train.jsonl").open("a") as train:
        for prompt in (
            Prompt("again", "test", PROMPTS[0].turns),
            Prompt("leak", "test", ("something ELSE entirely, please",)),
        ):
            train.write(json.dumps(prompt.to_json()) + "\n")
    result = make_rollouts(settings, split="train", output=tmp_path / "out", stop=lambda: True)
    counts = {"read": 62, "repeated": 1, "contaminated": 1, "over_limit": 0, "used": 60}
    assert result["prompts"] == counts


def test_a_training_set_that_is_all_contaminated_is_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(HELDOUT[0].to_json()))
    with pytest.raises(SettingError, match=r"prompts\.train: no prompt is left to answer .*\"contaminated\": 1"):
        make_rollouts(settings, split="train", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_self_written_prompts_join_the_training_set(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pipelines.prompts.self_written.rejection", lambda text, ids, reason: None if text else "length"
    )
    settings = settings.override("prompts.self_written=6", "prompts.limit=4")
    result = make_rollouts(settings, split="train", output=tmp_path / "out")
    assert result["prompts"]["self_written"]["kept"] == 6
    used = read_prompts([str(tmp_path / "out" / "prompts.jsonl")], "prompts.train")
    assert [prompt.source for prompt in used].count("self_written") == 6
    assert len(used) == 10 and result["asked"] == sum(len(prompt.turns) for prompt in used) == result["done"]
    again = make_rollouts(settings, split="train", output=tmp_path / "out")
    assert (again["done"], again["prompts"], again["tokens_per_s"]) == (result["done"], result["prompts"], None)


def test_follow_ups_that_are_not_usable_are_skipped_and_counted(settings: Settings, tmp_path: Path) -> None:
    settings = settings.override("prompts.follow_ups=2", "prompts.limit=8")
    result = make_rollouts(settings, split="train", output=tmp_path / "out")
    used = read_prompts([str(tmp_path / "out" / "prompts.jsonl")], "prompts.train")
    turns = sum(len(prompt.turns) for prompt in used)
    assert accounted(result) and result["asked"] == turns + 2 * len(used)
    assert result["failed"] == 0 and result["done"] >= turns
    assert all(reason.startswith("follow-up not used: ") for reason in result["skipped_by_reason"])
    assert make_rollouts(settings, split="heldout", output=tmp_path / "heldout")["asked"] == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("rollout.temperature=1.0", "rollout.temperature"),
        ("run.seed=1", "run.seed"),
        ("target.dtype=bfloat16", "target.dtype"),
        ("prompts.limit=3", "prompts.train"),
        ("prompts.follow_ups=1", "prompts.follow_ups"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    settings: Settings, tmp_path: Path, change: str, named: str
) -> None:
    make_rollouts(settings, split="train", output=tmp_path / "out", stop=lambda: True)
    with pytest.raises(SettingError, match=rf"^{named} is .*rollout\.overwrite=true"):
        make_rollouts(settings.override(change), split="train", output=tmp_path / "out")


def test_bad_input_is_one_line_and_writes_nothing(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"turns": ["fine"]}\n{"turns": 1}\n')
    failed = run_job(settings, tmp_path, "")
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1] == f"rollout: {tmp_path / 'train.jsonl'}:2: turns: expected a list, got int"
    assert not (tmp_path / "runs").exists()


def test_actors_on_a_local_ray_leave_a_cpu_to_ray_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for workers in (1, 2, 3, 7):
        settings = Settings().override(f"rollout.workers={workers}", "rollout.threads=2")
        assert 0 < workers * worker_cpus(settings, 4.0) <= 3.0
    on_a_cluster = Settings().override("ray.address=auto", "rollout.workers=7", "rollout.threads=2")
    assert worker_cpus(on_a_cluster, 4.0) == 2.0


def test_a_local_ray_refuses_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    on_gpus = Settings().override("target.device=cuda")
    assert worker_gpus(Settings(), "rollout.workers", 3, 0.0) == 0.0
    assert worker_gpus(on_gpus, "rollout.workers", 2, 2.0) == 1.0
    with pytest.raises(SettingError, match=r"^rollout\.workers: 2 workers need a GPU each, and this machine has 1$"):
        worker_gpus(on_gpus, "rollout.workers", 2, 1.0)
    assert worker_gpus(on_gpus.override("ray.address=auto"), "rollout.workers", 2, 1.0) == 1.0


def test_a_local_ray_leaves_nothing_behind_of_itself_or_of_one_that_was_killed() -> None:
    script = """
    import os, psutil
    from pipelines.cluster import ray_session
    from tierspec.config import Settings
    with ray_session(Settings().override(f"ray.temp_dir={os.environ['FOLDER']}")):
        print(*(process.pid for process in psutil.Process().children(recursive=True)))
    """
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is too long a path for Ray's sockets
        with subprocess.Popen(["true"]) as gone:
            gone.wait()
        (Path(folder) / f"tsr-{gone.pid:x}-0a1b" / "session").mkdir(parents=True)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=ROOT,
            env=os.environ | {"FOLDER": folder},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert not os.listdir(folder)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) > 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_folder_too_long_for_sockets_names_the_setting(tmp_path: Path) -> None:
    script = f"""
    from pipelines.cluster import ray_session
    from tierspec.config import Settings
    try:
        with ray_session(Settings().override("ray.temp_dir={tmp_path / ("x" * 60)}")):
            pass
    except Exception as error:
        print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("SettingError ray.temp_dir: "), done.stdout + done.stderr


def test_a_cluster_that_is_not_there_names_the_setting() -> None:
    script = """
    from pipelines.cluster import ray_session
    from tierspec.config import Settings
    try:
        with ray_session(Settings().override("ray.address=127.0.0.1:1")):
            pass
    except Exception as error:
        print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("SettingError ray.address: cannot join 127.0.0.1:1"), done.stdout + done.stderr


def test_nested_sessions_share_one_ray(session: None) -> None:
    before = ray.get_runtime_context().get_job_id()
    with ray_session(Settings()):
        assert ray.get_runtime_context().get_job_id() == before
    assert ray.is_initialized()
