"""The frame every job shares: arguments, settings, signals, errors and the result line."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from tierspec.artifacts import run_directory, write_provenance
from tierspec.config import Settings, load_settings
from tierspec.errors import RunFailed, SettingError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 130
_NO_FLAGS: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass
class JobContext:
    """What a job's main may know about the command it runs in."""

    name: str
    argv: Sequence[str]
    flags: frozenset[str] = frozenset()
    stop_signals: int = 0

    def stop_requested(self) -> bool:
        """True after the first Ctrl-C or SIGTERM: finish the unit of work at hand, save, return."""
        return self.stop_signals > 0

    def log(self, message: str) -> None:
        """One line on standard error."""
        print(f"[{self.name}] {message}", file=sys.stderr, flush=True)

    def open_stage(self, settings: Settings, stage: str) -> Path:
        """The stage's run directory, made, swept and stamped with where its content comes from."""
        directory = run_directory(settings, stage)
        write_provenance(directory, settings, self.argv)
        return directory


JobMain = Callable[[Settings, JobContext], dict[str, Any]]


def run_job(name: str, main: JobMain, flags: Mapping[str, str] = _NO_FLAGS) -> NoReturn:
    """Run `main` as `python -m jobs.<name>` and exit: 0 done, 2 bad input, 130 stopped on request, 1 failed.

    `flags`: options of this job without a value, each with its help; those given are in the context.
    """
    sys.exit(execute(name, main, sys.argv[1:], flags))


def execute(name: str, main: JobMain, arguments: Sequence[str], flags: Mapping[str, str] = _NO_FLAGS) -> int:
    """`run_job` without the exit. `main` returns the job's result; JSON values only.

    With --json the result is the last line of standard output and everything else goes to standard error; without it
    the result's plain values are summed up in one line on standard error.
    """
    options = _parser(name, flags).parse_intermixed_args(arguments)
    context: JobContext | None = None
    try:
        settings = load_settings(options.config, options.overrides)
        if options.print_config:
            print(settings.to_yaml(), end="")
            return 0
        if not (settings.ray.address or os.environ.get("RAY_ADDRESS")):
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local Ray >= 2.59 would turn token auth on by itself
        given = frozenset(flag for flag in flags if getattr(options, flag))
        context = JobContext(name, ["python", "-m", f"jobs.{name}", *arguments], given)
        standard_output = sys.stdout
        with _stop_signals(context), _everything_to_stderr(options.json):
            result = main(settings, context)
            if options.json:
                print(json.dumps(result, ensure_ascii=False, allow_nan=False), file=standard_output, flush=True)
            else:
                context.log(_summary(result))
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return EXIT_STOPPED
    except Exception as error:
        if context is not None and context.stop_signals > 1:  # what the second signal broke
            print(f"{name}: stopped", file=sys.stderr)
            return EXIT_STOPPED
        cause = getattr(error, "cause", None)  # Ray wraps what a remote task raised
        mistake = cause if isinstance(cause, SettingError) else error
        if isinstance(mistake, OSError) and mistake.filename is not None:
            line = f"{mistake.filename}: {mistake.strerror}"
        elif isinstance(mistake, SettingError | RunFailed):
            line = " ".join(str(mistake).splitlines())
        else:
            raise
        print(f"{name}: {line}", file=sys.stderr)
        return EXIT_FAILED if isinstance(mistake, RunFailed) else EXIT_BAD_INPUT
    return EXIT_STOPPED if context.stop_requested() else 0


def _parser(name: str, flags: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"tierspec {name}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML preset; without it the defaults hold")
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help="settings that override the preset")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, last line of standard output")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    return parser


@contextlib.contextmanager
def _stop_signals(context: JobContext) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        context.stop_signals += 1
        if context.stop_signals > 1:
            raise KeyboardInterrupt
        context.log("stopping after the work at hand; a second Ctrl-C stops at once")

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _everything_to_stderr(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


def _summary(result: dict[str, Any]) -> str:
    plain = {key: value for key, value in result.items() if isinstance(value, str | int | float | bool)}
    return "done: " + ", ".join(f"{key}={value}" for key, value in plain.items()) if plain else "done"
