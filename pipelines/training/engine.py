"""The DeepSpeed engine of the drafter: its configuration, its state on disk, and its whole weights."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.training.job import PROGRESS, TRAINING_STATE
from pipelines.training.whole_state import WholeState
from tierspec.artifacts import atomic_write_json, read_object
from tierspec.config import TrainingSettings
from tierspec.errors import ArtifactError
from tierspec.training.optimizer import GroupClippedAdamW
from tierspec.training.trainee import Trainee

Weights = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass
class Progress:
    """Where a run stands; together with the settings it determines all that follows. Data order, anchors and learning
    rate are functions of the step (of the elapsed time too under `training.max_minutes`)."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_accept_len: float = 0.0
    best_step: int = 0


def deepspeed_config(settings: TrainingSettings, world_size: int) -> dict[str, Any]:
    """fp32 masters; mixed precision is the trainee's own autocast, and the optimizer clips. One worker has nothing to
    partition, so ZeRO-1 is plain there."""
    stage = 0 if world_size == 1 and settings.zero_stage == 1 else settings.zero_stage
    return {
        "train_micro_batch_size_per_gpu": settings.batch_sequences,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


class DrafterEngine:
    """Every method is collective: all ranks call it alike."""

    def __init__(self, trainee: Trainee, settings: TrainingSettings, world_size: int) -> None:
        import deepspeed  # reads the environment that `prepare_process` sets

        config = deepspeed_config(settings, world_size)
        self._stage = config["zero_optimization"]["stage"]
        self._accumulation = settings.accumulation
        self._optimizer = GroupClippedAdamW(trainee.parameter_groups(), settings, partitioned=self._stage > 0)
        self._engine, *_ = deepspeed.initialize(model=trainee, optimizer=self._optimizer, config=config)
        if world_size == 1 and not self._stage:
            self._engine.enable_backward_allreduce = False  # it would copy all gradients twice, to itself
        self._state = WholeState(self._engine, trainee, self._optimizer, self._stage)
        self._trainee, self._world = trainee, world_size

    @property
    def holds_whole_weights(self) -> bool:
        """Whether this rank can run the trainee by itself: ZeRO-3 leaves each a share of the weights."""
        return self._stage < 3

    def loss_divisor(self, blocks: float) -> float:
        """What a micro-batch's sum over blocks is divided by, so that the step averages over all `blocks` of all
        ranks and micro-batches: the engine averages over those two by itself."""
        return blocks / (self._world * self._accumulation)

    def forward_backward(self, batch: Any, divisor: float) -> tuple[Tensor, Any]:
        """One micro-batch: its share of the step's loss on this rank, and its monitors."""
        loss, monitors = self._engine(batch, divisor)
        self._engine.backward(loss)
        return loss.detach() / self._accumulation, monitors

    def step(self, learning_rate: float) -> dict[str, float]:
        """Ends a micro-batch, and the optimizer step if it was the last; gradient norms by parameter group."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["rate"]
        self._engine.step()
        return dict(self._optimizer.gradient_norms)

    def save(self, directory: Path | None, progress: Progress) -> Weights:
        """The training state, into `directory`; None: another rank writes it. Returns what `weights` does."""
        tensors = self._state.collect(progress.step)
        if directory is not None:
            save_file(tensors, str(directory / TRAINING_STATE))
            atomic_write_json(directory / PROGRESS, asdict(progress))
        return self._split(tensors)

    def load(self, directory: Path) -> Progress:
        """Restores weights, optimizer and progress from what `save` wrote, whatever workers and stage it had."""
        try:
            progress = Progress(**read_object(directory / PROGRESS))
            self._state.restore(load_file(str(directory / TRAINING_STATE)), progress.step)
        except (SafetensorError, OSError, TypeError, KeyError) as error:
            raise ArtifactError(
                f"the checkpoint {directory} is incomplete or corrupt ({error}); training.overwrite=true trains anew"
            ) from error
        return progress

    def weights(self) -> Weights:
        """Copies of the whole weights in fp32: drafter and verification head."""
        return self._split(self._state.collect(0))

    def _split(self, tensors: dict[str, Tensor]) -> Weights:
        parts = (self._trainee.drafter, self._trainee.verification_head)
        drafter, head = (
            {name: tensors[f"{prefix}.{name}"] for name, _ in part.named_parameters()}
            for prefix, part in zip(("drafter", "verification_head"), parts, strict=True)
        )
        return drafter, head


def agree(values: list[float], device: torch.device, world_size: int) -> list[float]:
    """The maximum of each value over all ranks."""
    if world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def add_up(tensor: Tensor, world_size: int) -> Tensor:
    """The sum over all ranks."""
    if world_size > 1:
        dist.all_reduce(tensor)
    return tensor
