"""Adds each token's adapter to what the base model's linears compute.

Knows where a module's slot weights are found and which tokens use which slot. Knows nothing of
adapters' names, files or how slots are assigned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from engine.config import LoRAConfig
from engine.lora.adapter import LoRAAdapter
from engine.lora.slot_changes import SlotChanges
from engine.lora.targets import ModelTargets
from engine.lora.weights import LoRAWeights, SlotWeights
from engine.models.context import ForwardContext, LoRAScope
from engine.models.layers import KernelLinear, LinearGroup
from kernels import ops


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where a model runs; ``head_modules`` see only the tokens whose logits are wanted."""

    dtype: torch.dtype
    device: torch.device
    head_modules: frozenset[str]


class LoRAUpdate:
    """``y += scaling * B @ A @ x`` of each token's adapter, for linears that share their input.

    Then what an adapter changes otherwise, such as DoRA's scale: with ``fuses_scales`` in the same
    launch. Does nothing in a step without adapters, or while no adapter in a slot targets the
    linears.
    """

    __slots__ = ("_changes", "_fuses_scales", "_names", "_scope", "_weights")

    def __init__(
        self,
        names: tuple[str, ...],
        slots: "LoRASlots",
        scope: LoRAScope,
        *,
        fuses_scales: bool = False,
    ) -> None:
        self._names = names
        self._weights = slots.weights
        self._changes = slots.changes
        self._scope = scope
        self._fuses_scales = fuses_scales

    @property
    def slot_weights(self) -> SlotWeights | None:
        """What the linears add from, None while no adapter has targeted them."""
        return self._weights.module(self._names[0])

    def __call__(self, rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        scope = self._scope
        batch = scope.batch
        if batch is None:
            return
        changes = scope.changes
        scales = None
        if (lora := self.slot_weights) is not None:
            if changes is not None and self._fuses_scales:
                scales = self._changes.scale_tables(self._names)
            ops.lora_apply(rows, lora.lora_a, lora.lora_b, lora.ranks, batch, outs, scales)
        if changes is not None:
            is_scaled = scales is not None
            self._changes.apply_to_linears(self._names, rows, outs, changes, is_scaled=is_scaled)


class LoRASlots:
    """The slots of one model: what the kernels read, and what adapters change otherwise."""

    def __init__(self, weights: LoRAWeights, changes: SlotChanges) -> None:
        self.weights = weights
        self.changes = changes

    @property
    def size_bytes(self) -> int:
        """Device memory of what is allocated so far."""
        return self.weights.size_bytes + self.changes.size_bytes

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        """Replace what the slot holds by the adapter. No running step may use the slot."""
        self.changes.clear_slot(slot)
        self.weights.write_slot(slot, adapter)
        self.changes.write_slot(slot, adapter.changes)

    def clear_slot(self, slot: int) -> None:
        """Make the slot change nothing."""
        self.changes.clear_slot(slot)
        self.weights.clear_slot(slot)


def attach_lora(
    model: nn.Module,
    targets: ModelTargets,
    config: LoRAConfig,
    context: ForwardContext,
    place: ModelPlace,
) -> LoRASlots:
    """Let every linear of `model` add the adapters in the returned slots."""

    def scope_of(name: str) -> LoRAScope:
        return context.head if name in place.head_modules else context.layers

    linears = {m: name for name, m in model.named_modules() if isinstance(m, KernelLinear)}
    groups = [module for module in model.modules() if isinstance(module, LinearGroup)]
    # On a CPU, scaling the tokens that need it costs less than a table's row for every token.
    fuses_scales = place.device.type != "cpu"
    names = [tuple(linears[member] for member in group.members) for group in groups]
    changes = SlotChanges(model, targets, config.max_loras, place.device, scope_of)
    slots = LoRASlots(LoRAWeights(targets, config, place.dtype, place.device, names), changes)
    context.select = changes.select
    for group, members in zip(groups, names, strict=True):
        group.update = LoRAUpdate(members, slots, context.layers, fuses_scales=fuses_scales)
        for member in group.members:
            member.update = _refuse
            del linears[member]
    for linear, name in linears.items():
        scope = scope_of(name)
        linear.update = LoRAUpdate((name,), slots, scope, fuses_scales=fuses_scales)
    return slots


def _refuse(rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> NoReturn:
    """Stands where an adapter would be lost: a group's member that was run by itself."""
    raise AssertionError("a linear of a group runs only with its group")
