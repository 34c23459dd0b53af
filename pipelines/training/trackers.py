"""Where a run's scalars go besides its own log: TensorBoard, MLflow or Weights & Biases, through their own libraries.

The last two are extras, configured as their users know it: by environment variables such as MLFLOW_TRACKING_URI and
WANDB_MODE.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tierspec.config import Settings
from tierspec.errors import SettingError

_MODULES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes the scalars of a run. A run that is taken up again at a step repeats the later ones."""

    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files beside the training state."""

    def __init__(self, settings: Settings, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class MLflow:
    """A run of the experiment `tierspec`, one for the whole training, resumed or not."""

    def __init__(self, settings: Settings, directory: Path, step: int) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        known = directory / "mlflow-run-id"
        run_id = known.read_text(encoding="utf-8") if step and known.exists() else None
        self._mlflow.set_experiment("tierspec")
        run = self._mlflow.start_run(run_id=run_id, run_name=settings.run.name)
        if run_id is None:
            known.write_text(run.info.run_id, encoding="utf-8")
            self._mlflow.log_dict(settings.model_dump(mode="json"), "settings.json")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WeightsAndBiases:
    """A run of the project `tierspec`, one for the whole training, resumed or not."""

    def __init__(self, settings: Settings, directory: Path, step: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        known = directory / "wandb-run-id"
        run_id = known.read_text(encoding="utf-8") if step and known.exists() else None
        config = settings.model_dump(mode="json")
        self._run = wandb.init(
            project="tierspec", name=settings.run.name, id=run_id, resume="allow", dir=str(directory), config=config
        )
        known.write_text(self._run.id, encoding="utf-8")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def check_trackers(settings: Settings) -> None:
    """SettingError if the library of one of `training.trackers` is not installed."""
    for name in settings.training.trackers:
        try:
            importlib.import_module(_MODULES[name])
        except ImportError as error:
            raise SettingError(f"training.trackers: {name} is not installed: pip install 'tierspec[{name}]'") from error


def open_trackers(settings: Settings, directory: Path, step: int) -> list[Tracker]:
    """Those of `training.trackers`; `step`: the one that the run is taken up at."""
    return [_KINDS[name](settings, directory, step) for name in settings.training.trackers]
