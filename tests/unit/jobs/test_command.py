import json
import os
import re
import signal
import subprocess
import sys

import pytest

from jobs.command import execute
from tests.conftest import ROOT
from tierspec.config import load_settings
from tierspec.errors import RunFailed, SettingError


def succeed(settings, context):
    print("a table for people")
    context.log("working")
    return {"tokens": 3, "name": settings.run.name, "parts": [1, 2]}


def test_json_is_the_last_and_only_line_of_standard_output(capsys):
    assert execute("evaluate", succeed, ["run.name=x", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"tokens": 3, "name": "x", "parts": [1, 2]}
    assert "a table for people" in err and "[evaluate] working" in err


def test_without_json_people_get_their_output_and_a_summary(capsys):
    assert execute("evaluate", succeed, []) == 0
    out, err = capsys.readouterr()
    assert out == "a table for people\n"
    assert "done: tokens=3" in err


def test_options_may_stand_anywhere(capsys):
    assert execute("evaluate", succeed, ["run.name=x", "--json", "run.seed=1", "--config", "configs/tiny.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "x"


def test_print_config_prints_settings_and_stops(capsys, tmp_path):
    assert execute("train", pytest.fail, ["--print-config", "training.depth=2"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_settings(printed).training.depth == 2


def test_bad_input_is_one_line_and_exit_2(capsys, tmp_path):
    assert execute("train", pytest.fail, ["training.dept=2", f"run.root={tmp_path}/runs"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "train: unknown setting 'training.dept' (did you mean 'training.depth'?)\n")
    assert list(tmp_path.iterdir()) == []


def test_bad_input_found_late_or_remotely_is_one_line_too(capsys):
    class RemoteError(Exception):
        cause = SettingError("prompts.train: a.jsonl, line 3: not JSON")

    for error in (RemoteError("long trace"), RemoteError.cause):

        def fail(settings, context, error=error):
            raise error

        assert execute("rollout", fail, []) == 2
        assert capsys.readouterr().err == "rollout: prompts.train: a.jsonl, line 3: not JSON\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "runs/x/model.safetensors"),
            2,
            "runs/x/model.safetensors: No",
        ),
        (RunFailed("a worker was lost"), 1, "a worker was lost"),
        (SettingError("a\nb"), 2, "a b"),
    ],
)
def test_files_and_lost_processes_are_one_line(capsys, error, code, line):
    def fail(settings, context):
        raise error

    assert execute("train", fail, []) == code
    err = capsys.readouterr().err
    assert err.startswith(f"train: {line}") and err.count("\n") == 1


def test_other_failures_keep_their_traceback():
    def fail(settings, context):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        execute("train", fail, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_second_stops(number, capsys):
    before = signal.getsignal(number)

    def stop_when_asked(settings, context):
        assert not context.stop_requested()
        os.kill(os.getpid(), number)
        assert context.stop_requested()
        return {"saved": True}

    def go_on_regardless(settings, context):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        pytest.fail("not stopped")

    def break_on_the_second(settings, context):
        try:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise RuntimeError("no tier can go on") from None

    assert execute("train", stop_when_asked, []) == 130
    assert execute("train", break_on_the_second, []) == 130
    assert execute("train", go_on_regardless, []) == 130
    assert "a second Ctrl-C stops at once" in capsys.readouterr().err
    assert signal.getsignal(number) is before


def test_a_stage_records_the_command(tmp_path):
    def main(settings, context):
        return {"directory": str(context.open_stage(settings, "drafter"))}

    assert execute("train", main, [f"run.root={tmp_path}", "run.name=x"]) == 0
    command = (tmp_path / "x" / "drafter" / "command.txt").read_text()
    assert command == f"python -m jobs.train run.root={tmp_path} run.name=x\n"


@pytest.mark.parametrize(("arguments", "code"), [(["nothing"], 2), ([], 2), (["--help"], 0)])
def test_the_console_script_lists_the_jobs(arguments, code):
    done = subprocess.run(
        [sys.executable, "-c", "from jobs.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == code
    listed = re.search(r"usage: tierspec \{(.+?)\}", done.stdout + done.stderr)
    assert listed is not None
    runnable = {path.stem for path in (ROOT / "jobs").glob("*.py") if "run_job(" in path.read_text()} - {"command"}
    assert set(listed[1].split(",")) == runnable
