import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.training.records import RunLog
from pipelines.training.trackers import check_trackers, open_trackers
from tierspec.config import Settings
from tierspec.errors import SettingError


class Library:
    """Stands for mlflow and wandb: notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def start_run(self, run_id: str | None, run_name: str) -> Any:
        self.calls.append(("run", run_id))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new"))

    def init(self, **options: Any) -> Any:
        self.calls.append(("run", options["id"]))
        log = SimpleNamespace(log=lambda values, step: self.calls.append(("log", (values, step))))
        return SimpleNamespace(id=options["id"] or "new", log=log.log, finish=lambda: self.calls.append(("end", None)))

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (values, step)))

    def end_run(self) -> None:
        self.calls.append(("end", None))

    def set_experiment(self, name: str) -> None: ...

    def log_dict(self, values: dict[str, Any], name: str) -> None: ...


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_resumed_training_goes_on_with_its_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, name, library)  # type: ignore[arg-type]
    settings = Settings().override(f"training.trackers=[{name}]")
    check_trackers(settings)
    for step in (0, 2, 0):
        log = RunLog(tmp_path / "log.jsonl", step, open_trackers(settings, tmp_path, step))
        log.write("start", step, {"total_steps": 4})
        log.write("step", step + 1, {"loss": 1.5, "note": "text"})
        log.close()
    expected: list[tuple[str, Any]] = []
    for step, run in ((0, None), (2, "new"), (0, None)):
        expected += [("run", run), ("log", ({"step/loss": 1.5}, step + 1)), ("end", None)]
    assert library.calls == expected


def test_a_library_that_is_missing_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        SettingError, match=r"^training\.trackers: wandb is not installed: pip install 'tierspec\[wandb\]'"
    ):
        check_trackers(Settings().override("training.trackers=[tensorboard, wandb]"))
