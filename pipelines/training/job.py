"""What the driver tells a training worker, and the names of the files both know."""

from dataclasses import dataclass
from pathlib import Path

from tierspec.config import Settings
from tierspec.training.data import Sample

BEST, CHECKPOINTS, INFERENCE = "best", "checkpoints", "inference"
TRAINING_STATE, PROGRESS = "state.safetensors", "progress.json"  # of a checkpoint
LOG, METRICS, RESULT, STOP_FILE = "metrics.jsonl", "metrics.json", "result.json", "stop"
SAMPLE, PAGE = "sample.json", "training.html"
PROVENANCE = ("run.yaml", "command.txt", "versions.json")


@dataclass(frozen=True)
class WorkerJob:
    """`template_hash`: of the chat template that the samples were made with; `state`: folder of the training state;
    `features`: that of the target's features, shared by all trainings of the run. Absolute paths on storage that all
    workers and the driver share."""

    settings: Settings
    samples: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    template_hash: str
    state: Path
    features: Path
