"""Changes beyond B @ A on the device, by slot, and how they are applied to modules' outputs.

Knows modules' outputs and which rows belong to which slot. Knows nothing of files, PEFT or when a
slot is used. A module takes no part until an adapter in a slot changes it, and a step without
tokens of such a slot skips all of this.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine.lora.change_batch import ChangeBatch, select_changed
from engine.lora.module_change import ModuleChange
from engine.lora.targets import LoRATarget, ModelTargets, TargetKind
from engine.models.context import LoRAScope
from engine.models.layers import KernelRMSNorm
from kernels import ops
from kernels.metadata import LoRABatch

# Scale and shift that leave every float as it is: adding plus zero would turn minus zero into it.
_NEUTRAL = torch.tensor([[1.0], [-0.0]])


class SlotChanges:
    """What the adapters in the slots change, by module.

    ``scope_of`` tells which tokens a module sees.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: ModelTargets,
        max_loras: int,
        device: torch.device,
        scope_of: Callable[[str], LoRAScope],
    ) -> None:
        self._model = model
        self._targets = targets
        self._max_loras = max_loras
        self._device = device
        self._scope_of = scope_of
        self._slots: set[int] = set()
        self._by_module: dict[str, dict[int, ModuleChange]] = {}
        # [slots + 1, 2, out]: scale and shift, neutral where a slot has no change and at the end.
        self._tables: dict[str, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Device memory of what is there now."""
        changes = [change for module in self._by_module.values() for change in module.values()]
        tables = sum(table.nbytes for table in self._tables.values())
        return tables + sum(change.size_bytes for change in changes)

    def select(self, batch: LoRABatch) -> ChangeBatch | None:
        """The tokens of a step that any of these changes concerns."""
        return select_changed(batch, self._slots, self._max_loras) if self._slots else None

    def write_slot(self, slot: int, changes: Mapping[str, ModuleChange]) -> None:
        """Put an adapter's changes into a slot that is clear."""
        for name, change in changes.items():
            placed = change.to(self._device)
            self._module(name)[slot] = placed
            if self._targets[name].kind.is_linear and placed.scale is not None:
                assert placed.shift is not None
                self._table(self._targets[name])[slot] = torch.stack((placed.scale, placed.shift))
            self._slots.add(slot)

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's changes."""
        if slot not in self._slots:
            return
        self._slots.remove(slot)
        for name, by_slot in self._by_module.items():
            if by_slot.pop(slot, None) is not None and name in self._tables:
                self._tables[name][slot] = _NEUTRAL

    def apply_to_linears(
        self,
        names: Sequence[str],
        rows: torch.Tensor,
        outs: Sequence[torch.Tensor],
        batch: ChangeBatch,
        *,
        is_scaled: bool = False,
    ) -> None:
        """Change the outputs [T, out] of linears with input rows [T, in], in place.

        With ``is_scaled`` they were multiplied by `scale_tables` already.
        """
        for name, out in zip(names, outs, strict=True):
            by_slot = self._by_module.get(name)
            if not by_slot:
                continue
            table = self._tables.get(name)
            if table is not None and not is_scaled:
                _scale(table, out, batch)
            for start, stop, slot in batch.runs:
                if slot in by_slot and by_slot[slot].scale is None:
                    _apply_to_linear(by_slot[slot], rows[start:stop], out[start:stop])

    def scale_tables(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """Scale and shift of the linears by slot, as ``kernels.ops.lora_apply`` takes them.

        None while no adapter in a slot scales any of them.
        """
        if not any(name in self._tables and self._by_module.get(name) for name in names):
            return None
        return [self._table(self._targets[name]) for name in names]

    def _table(self, target: LoRATarget) -> torch.Tensor:
        if target.name not in self._tables:
            table = _NEUTRAL.repeat(self._max_loras + 1, 1, target.out_features)
            self._tables[target.name] = table.to(self._device)
        return self._tables[target.name]

    def _module(self, name: str) -> dict[int, ModuleChange]:
        """The changes of one module, which takes part from now on."""
        if name not in self._by_module:
            self._by_module[name] = {}
            target = self._targets[name]
            if not target.kind.is_linear:
                self._watch(target, self._model.get_submodule(name), self._by_module[name])
        return self._by_module[name]

    def _watch(
        self, target: LoRATarget, module: nn.Module, by_slot: dict[int, ModuleChange]
    ) -> None:
        scope = self._scope_of(target.name)
        if isinstance(module, KernelRMSNorm):
            module.update = _NormUpdate(module.eps, scope, by_slot)
            return
        is_embedding = target.kind is TargetKind.EMBEDDING

        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            batch = scope.changes
            if batch is None or not by_slot:
                return output
            inputs = args[0].reshape(-1) if is_embedding else args[0].reshape(-1, output.shape[-1])
            flat = output.reshape(-1, output.shape[-1])
            assert inputs.shape[0] == flat.shape[0] == batch.num_tokens, target.name
            for start, stop, slot in batch.runs:
                if slot in by_slot:
                    span = slice(start, stop)
                    change = _embed if is_embedding else _normalise
                    flat[span] = change(module, by_slot[slot], inputs[span], flat[span])
            return flat.view(output.shape)

        module.register_forward_hook(hook)


class _NormUpdate:
    """Gives the rows of changed slots the norm with their own weight."""

    __slots__ = ("_by_slot", "_eps", "_scope")

    def __init__(self, eps: float, scope: LoRAScope, by_slot: dict[int, ModuleChange]) -> None:
        self._eps = eps
        self._scope = scope
        self._by_slot = by_slot

    def __call__(self, rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        batch = self._scope.changes
        if batch is None or not self._by_slot:
            return
        # A norm of heads sees one row for each head of each token.
        height, rest = divmod(rows.shape[0], batch.num_tokens)
        assert rest == 0
        for start, stop, slot in batch.runs:
            change = self._by_slot.get(slot)
            if change is not None and change.weight is not None:
                span = slice(start * height, stop * height)
                outs[0][span] = ops.rms_norm(rows[span], change.weight, self._eps)


def _scale(table: torch.Tensor, out: torch.Tensor, batch: ChangeBatch) -> None:
    """Multiply and shift the rows of slots that are in the batch, in float32, rounded once."""
    for start, stop, places in batch.spans:
        found = table[places] if isinstance(places, int) else table.index_select(0, places)
        scale, shift = found.unbind(-2)
        rows = out[start:stop]
        torch.addcmul(shift, rows, scale, out=rows)


def _apply_to_linear(change: ModuleChange, rows: torch.Tensor, out: torch.Tensor) -> None:
    if change.weight is not None:
        out.copy_(ops.linear(rows, change.weight, change.bias))
    if change.token_ids is not None and change.token_rows is not None:
        out[:, change.token_ids] = ops.linear(rows, change.token_rows)


def _embed(
    module: nn.Module, change: ModuleChange, ids: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Embed ids [n] as the changed module would; out [n, width] is the base model's."""
    factor = getattr(module, "embed_scale", None)
    scaling = 1.0 if factor is None else factor.to(out.dtype)
    if change.weight is not None:
        return change.weight[ids] * scaling
    if change.table is not None and change.expand is not None:
        result = out + (change.table[ids] @ change.expand) * scaling
        return result if change.scale is None else (result * change.scale).to(out.dtype)
    assert change.token_ids is not None and change.token_rows is not None
    hits = ids[:, None] == change.token_ids
    trained = change.token_rows[hits.int().argmax(dim=1)] * scaling
    return torch.where(hits.any(dim=1, keepdim=True), trained, out)


def _normalise(
    module: nn.Module, change: ModuleChange, rows: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Run a copy of a norm that has the changed weights."""
    changed = copy.copy(module)
    parameters = dict(module._parameters)
    for name in ("weight", "bias"):
        value = getattr(change, name)
        if value is not None:
            parameters[name] = nn.Parameter(value, requires_grad=False)
    changed._parameters = parameters
    result: torch.Tensor = changed.forward(rows)
    return result
