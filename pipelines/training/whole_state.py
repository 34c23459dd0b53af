"""Weights and optimizer moments as whole tensors, independent of the number of workers and of the ZeRO stage."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARES = ("", *["single_partition_of_fp32_groups"] * 2, "fp32_partitioned_groups_flat")  # by ZeRO stage


def _key(name: str, moment: str) -> str:
    return f"{name}.{moment}" if moment else name


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
            for moment in ("", *(MOMENTS if steps else ())):
                tensors[_key(name, moment)] = self._get(parameter, moment)
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
                self._set(parameter, tensors[_key(name, moment)].to(parameter.device), moment)

    def _get(self, parameter: nn.Parameter, moment: str) -> Tensor:
        """A whole weight (no `moment`) or moment."""
        if self._stage == 3:
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

            return safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        if not self._stage:
            return self._optimizer.state[parameter][moment] if moment else parameter
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        self._copy_share(parameter, whole, moment, into_whole=True)
        dist.all_reduce(whole)
        return whole.view_as(parameter)

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
            self._copy_share(parameter, value.flatten(), moment, into_whole=False)
        elif moment:
            self._optimizer.state[parameter][moment].copy_(value)

    def _copy_share(self, parameter: nn.Parameter, whole: Tensor, moment: str, *, into_whole: bool) -> None:
        """Between a flat whole tensor and what this rank holds of it under ZeRO 1 and 2, if anything."""
        place: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if place is None:
            return
        share = getattr(self._engine.optimizer, _SHARES[self._stage])[place.param_group_index]
        held = self._optimizer.state[share][moment] if moment else share.data
        mine = held.narrow(0, place.hp_fragment_address.start, place.hp_fragment_address.numel)
        part = whole.narrow(0, place.lp_fragment_address.start, place.lp_fragment_address.numel)
        if into_whole:
            part.copy_(mine)
        else:
            mine.copy_(part)

    def _make_moments(self, steps: int) -> None:
        """DeepSpeed and PyTorch make them at the first step, which is too late."""
        shares = getattr(self._engine.optimizer, _SHARES[self._stage]) if self._stage else self._module.parameters()
        for share in shares:
            moments = {moment: torch.zeros_like(share) for moment in MOMENTS}
            self._optimizer.state[share] = {"step": torch.tensor(float(steps), device=share.device), **moments}
