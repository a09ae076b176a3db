"""Cuts an adapter into what each rank adds, so that the ranks' sums are the adapter's.

Where outputs are split, so are B, DoRA's scale and new rows of weights; where inputs are split, so
is A, and what is added once is added by the first rank. Embeddings and norms are computed whole on
every rank, and so are their changes. Knows tensors. Knows nothing of slots or processes.
"""

from dataclasses import replace

import torch

from engine.lora.adapter import LoRAAdapter, LoRAModule, allocate_modules
from engine.lora.module_change import ModuleChange
from engine.parallel.group import span
from engine.parallel.sharding import ShardPlan, Split

_OUTPUTS = (Split.OUTPUTS, Split.VOCABULARY)
_BY_OUTPUT = ("scale", "shift", "weight", "bias")


def shard_adapter(adapter: LoRAAdapter, plan: ShardPlan, tp_rank: int, tp_size: int) -> LoRAAdapter:
    """Return rank `tp_rank`'s part of an adapter, in a buffer of its own."""
    parts = {
        name: _module_part(module, plan.splits.get(name), tp_rank, tp_size)
        for name, module in adapter.modules.items()
    }
    shapes = {name: (*a.shape, b.shape[1]) for name, (a, b) in parts.items()}
    buffer, modules = allocate_modules(shapes, adapter.buffer.dtype)
    for name, module in modules.items():
        lora_a, lora_b = parts[name]
        module.lora_a.copy_(lora_a)
        module.lora_b.copy_(lora_b)
    changes: dict[str, ModuleChange] = {}
    for name, change in adapter.changes.items():
        part = _change_part(name, change, plan, tp_rank, tp_size)
        if part is not None:
            changes[name] = part
    return replace(adapter, buffer=buffer, modules=modules, changes=changes)


def _module_part(
    module: LoRAModule, split: Split | None, tp_rank: int, tp_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of A and B."""
    if split in _OUTPUTS:
        return module.lora_a, module.lora_b[:, span(module.lora_b.shape[1], tp_rank, tp_size)]
    if split is Split.INPUTS:
        return module.lora_a[:, span(module.lora_a.shape[1], tp_rank, tp_size)], module.lora_b
    return module.lora_a, module.lora_b


def _change_part(
    name: str, change: ModuleChange, plan: ShardPlan, tp_rank: int, tp_size: int
) -> ModuleChange | None:
    """None when the change concerns other ranks alone."""
    split = plan.splits.get(name)
    if split is Split.OUTPUTS:
        return _of_outputs(change, tp_rank, tp_size)
    if split is Split.VOCABULARY:
        return _of_head(change, plan.vocab_size, tp_rank, tp_size)
    if split is Split.INPUTS:
        return _of_inputs(change, tp_rank, tp_size)
    return change


def _of_outputs(change: ModuleChange, tp_rank: int, tp_size: int) -> ModuleChange:
    parts: dict[str, torch.Tensor] = {}
    for field, values in change.tensors.items():
        if field in _BY_OUTPUT:
            # A buffer of its own: a view would keep the whole alive, and travel whole.
            parts[field] = values[span(values.shape[0], tp_rank, tp_size)].clone()
    return ModuleChange(**parts)


def _of_head(
    change: ModuleChange, vocab_size: int, tp_rank: int, tp_size: int
) -> ModuleChange | None:
    part = _of_outputs(change, tp_rank, tp_size)
    if change.token_ids is not None and change.token_rows is not None:
        mine = span(vocab_size, tp_rank, tp_size)
        is_here = (change.token_ids >= mine.start) & (change.token_ids < mine.stop)
        if is_here.any():
            ids = change.token_ids[is_here] - mine.start
            part = replace(part, token_ids=ids, token_rows=change.token_rows[is_here])
    return part if part.tensors else None


def _of_inputs(change: ModuleChange, tp_rank: int, tp_size: int) -> ModuleChange:
    """The ranks' outputs are summed after the change: a factor counts on each, an addend once."""
    parts = change.tensors
    if (weight := change.weight) is not None:
        parts["weight"] = weight[:, span(weight.shape[1], tp_rank, tp_size)].contiguous()
    if tp_rank != 0:
        parts.pop("bias", None)
        if change.shift is not None:
            parts["shift"] = torch.full_like(change.shift, -0.0)
    return ModuleChange(**parts)
