"""Adds each token's adapter to what the base model's linears compute.

Knows where a module's slot weights are found and which tokens use which slot. Knows nothing of
adapters' names, files or how slots are assigned.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from engine.config import LoRAConfig
from engine.lora.targets import ModelTargets, TargetKind
from engine.lora.weights import LoRAWeights
from engine.models.context import ForwardContext, LoRAScope
from engine.models.layers import KernelLinear, LinearGroup
from kernels import ops


class LoRAUpdate:
    """``y += scaling * B @ A @ x`` of each token's adapter, for linears that share their input.

    Does nothing in a step without adapters, or while no adapter in a slot targets the linears.
    """

    __slots__ = ("_name", "_scope", "_weights")

    def __init__(self, name: str, weights: LoRAWeights, scope: LoRAScope) -> None:
        self._name = name
        self._weights = weights
        self._scope = scope

    def __call__(self, rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        batch = self._scope.batch
        if batch is not None and (lora := self._weights.module(self._name)) is not None:
            ops.lora_apply(rows, lora.lora_a, lora.lora_b, lora.ranks, batch, outs)


def attach_lora(
    model: nn.Module,
    targets: ModelTargets,
    config: LoRAConfig,
    context: ForwardContext,
    dtype: torch.dtype,
    device: torch.device,
) -> LoRAWeights:
    """Let every linear of `model` add the adapters in the returned slots."""
    linears = {m: name for name, m in model.named_modules() if isinstance(m, KernelLinear)}
    groups = [module for module in model.modules() if isinstance(module, LinearGroup)]
    names = [tuple(linears[member] for member in group.members) for group in groups]
    weights = LoRAWeights(targets, config, dtype, device, names)
    for group, members in zip(groups, names, strict=True):
        group.update = LoRAUpdate(members[0], weights, context.layers)
        for member in group.members:
            member.update = _refuse
            del linears[member]
    for linear, name in linears.items():
        is_head = targets[name].kind is TargetKind.LM_HEAD
        linear.update = LoRAUpdate(name, weights, context.head if is_head else context.layers)
    return weights


def _refuse(rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> NoReturn:
    """Stands where an adapter would be lost: a group's member that was run by itself."""
    raise AssertionError("a linear of a group runs only with its group")
