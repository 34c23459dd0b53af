"""Weights and optimizer moments as whole tensors, independent of the number of workers and of the ZeRO stage."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARES = ("", *["single_partition_of_fp32_groups"] * 2, "fp32_partitioned_groups_flat")  # by ZeRO stage


class WholeState:
    """The state of a DeepSpeed engine around `module`, whose optimizer is an AdamW; every method is collective.

    Tensors are fp32, named `<parameter>` and `<parameter>.<moment>`; before the first step there are no moments.
    """

    def __init__(self, engine: Any, module: nn.Module, optimizer: torch.optim.AdamW, stage: int) -> None:
        self._engine, self._module, self._optimizer, self._stage = engine, module, optimizer, stage

    def collect(self, steps: int) -> dict[str, Tensor]:
        """Copies on CPU; `steps`: optimizer steps taken."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            tensors[name] = self._weight(parameter)
            for moment in MOMENTS if steps else ():
                tensors[f"{name}.{moment}"] = self._moment(parameter, moment)
        return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """The state that `collect` returned."""
        parameters = dict(self._module.named_parameters())
        if self._stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
                for name, parameter in parameters.items():
                    parameter.copy_(tensors[name])
        else:
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
        if steps:
            self._make_moments(steps)
        for name, parameter in parameters.items():
            for moment in ("", *(MOMENTS if steps else ())):
                value = tensors[f"{name}.{moment}" if moment else name].to(parameter.device)
                self._set(parameter, value, moment)

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        if not self._stage:
            return parameter
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        if not self._stage:
            return self._optimizer.state[parameter][moment]
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, moment)

    def _make_moments(self, steps: int) -> None:
        """DeepSpeed and PyTorch make them at the first step, which is too late."""
        shares = (
            getattr(self._engine.optimizer, _SHARES[self._stage]) if self._stage else list(self._module.parameters())
        )
        for share in shares:
            moments = {moment: torch.zeros_like(share) for moment in MOMENTS}
            self._optimizer.state[share] = {"step": torch.tensor(float(steps), device=share.device), **moments}

    def _set(self, parameter: nn.Parameter, value: Tensor, moment: str) -> None:
        """This rank's share of a weight (no `moment`) or of a moment."""
        if self._stage == 3:
            from deepspeed.utils import (
                safe_get_local_fp32_param,
                safe_set_local_fp32_param,
                safe_set_local_optimizer_state,
            )

            size = safe_get_local_fp32_param(parameter).numel()  # the last rank's share is padded
            padded = F.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
            share = padded.narrow(0, size * dist.get_rank(), size)
            if moment:
                safe_set_local_optimizer_state(parameter, share, moment)
            else:
                safe_set_local_fp32_param(parameter, share)
        elif self._stage:
            place: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # None: another rank's
            if place is not None:
                share = self._engine.optimizer.single_partition_of_fp32_groups[place.param_group_index]
                target = self._optimizer.state[share][moment] if moment else share.data
                held, whole = place.hp_fragment_address, place.lp_fragment_address
                target.narrow(0, held.start, held.numel).copy_(value.flatten().narrow(0, whole.start, whole.numel))
        elif moment:
            self._optimizer.state[parameter][moment].copy_(value)
