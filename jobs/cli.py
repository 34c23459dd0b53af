"""The console script: `tierspec <job> ...` is `python -m jobs.<job> ...`."""

import runpy
import sys

JOBS = ("rollout", "train", "payoff", "ablate", "evaluate", "calibrate", "serve", "demo")


def main() -> None:
    """Hand the arguments to the named job."""
    job = sys.argv[1] if len(sys.argv) > 1 else ""
    if job not in JOBS:
        asked_for_help = job in ("-h", "--help")
        usage = f"usage: tierspec {{{','.join(JOBS)}}} [--config FILE] [group.key=value ...]"
        problem = f"tierspec: unknown job '{job}'\n" if job and not asked_for_help else ""
        print(problem + usage, file=sys.stdout if asked_for_help else sys.stderr)
        sys.exit(0 if asked_for_help else 2)
    sys.argv = [f"jobs.{job}", *sys.argv[2:]]
    runpy.run_module(f"jobs.{job}", run_name="__main__")
