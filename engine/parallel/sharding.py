"""Splits a model of Llama's shape among ranks: which axis of which weight, and what is refused.

Attention is split by heads, the MLP by features, the vocabulary by tokens; norms are on every
rank. Knows the modules of these architectures. Knows nothing of adapters or batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModelError
from engine.lora.targets import ModelTargets
from engine.models.layers import KernelLinear
from engine.parallel.group import TensorParallelGroup, span
from engine.parallel.layers import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead

# Architectures whose layers have exactly the linears below.
_SPLIT_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_COLUMN_LINEARS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW_LINEARS = ("o_proj", "down_proj")


class Split(Enum):
    """Which axis of a module's weight the ranks share."""

    OUTPUTS = auto()
    INPUTS = auto()
    VOCABULARY = auto()  # the outputs of the head
    EMBEDDED_TOKENS = auto()


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How each split module is split, by its path; modules that are not here are on every rank."""

    splits: Mapping[str, Split]
    vocab_size: int

    def part_of(self, targets: ModelTargets, tp_rank: int, tp_size: int) -> ModelTargets:
        """The modules as one rank has them."""

        def part(width: int) -> int:
            mine = span(width, tp_rank, tp_size)
            return int(mine.stop - mine.start)

        modules = dict(targets.modules)
        for name, split in self.splits.items():
            target = modules[name]
            if split in (Split.OUTPUTS, Split.VOCABULARY):
                modules[name] = replace(target, out_features=part(target.out_features))
            elif split is Split.INPUTS:
                modules[name] = replace(target, in_features=part(target.in_features))
        return replace(targets, modules=modules)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """What is left of a model's split: the plan, and the whole weights, which rank 0 keeps.

    They stay on the host: mapped from the checkpoint, unless its dtype had to be converted.
    """

    plan: ShardPlan
    whole: Mapping[str, Mapping[str, torch.Tensor]]


def check_split(architecture: str, config: PretrainedConfig, tp_size: int) -> None:
    """Raise UnsupportedModelError when so many ranks cannot share the model exactly."""
    for reason in _objections(architecture, config, tp_size):
        raise UnsupportedModelError(f"{architecture}: {reason}")


def plan_shards(model: PreTrainedModel, tp_size: int) -> ShardPlan:
    """Say how to split a model whose weights are whole, or raise UnsupportedModelError."""
    check_split(type(model).__name__, model.config, tp_size)
    splits = {"model.embed_tokens": Split.EMBEDDED_TOKENS, "lm_head": Split.VOCABULARY}
    for name, _ in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in _COLUMN_LINEARS:
            splits[name] = Split.OUTPUTS
        elif kind in _ROW_LINEARS:
            splits[name] = Split.INPUTS
    return ShardPlan(splits, model.config.vocab_size)


def shard_model(model: PreTrainedModel, group: TensorParallelGroup) -> ShardedModel:
    """Put this rank's parts in place of the model's linears and embedding, on the rank's device."""
    plan = plan_shards(model, group.tp_size)
    cutter = _Cutter(group)
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for name, split in plan.splits.items():
        module = model.get_submodule(name)
        if group.is_first:
            whole[name] = dict(module.named_parameters())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, cutter.cut(module, split))
    return ShardedModel(plan, whole)


class _Cutter:
    """Makes one rank's layers; weights that are tied stay so."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self._parts: dict[torch.Tensor, torch.Tensor] = {}

    def cut(self, module: nn.Module, split: Split) -> nn.Module:
        """This rank's layer in place of a whole linear or embedding."""
        weight = module.get_parameter("weight")
        bias = module._parameters.get("bias")
        part = self._weight(weight, 1 if split is Split.INPUTS else 0)
        if split is Split.EMBEDDED_TOKENS:
            return VocabParallelEmbedding(part, weight.shape[0], self._group)
        if split is Split.INPUTS:
            whole_bias = None if bias is None else bias.to(self._group.device)
            return RowParallelLinear(part, whole_bias, self._group)
        part_of_bias = None if bias is None else self._narrow(bias, 0)
        if split is Split.VOCABULARY:
            return VocabParallelHead(part, part_of_bias, weight.shape[0], self._group)
        return KernelLinear(part, part_of_bias)

    def _weight(self, weight: torch.Tensor, axis: int) -> torch.Tensor:
        if weight not in self._parts:
            self._parts[weight] = self._narrow(weight, axis)
        return self._parts[weight]

    def _narrow(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """Whole rows are a view: on a CPU they stay in the checkpoint's mapping."""
        mine = self._group.span(values.shape[axis])
        part = values.detach().narrow(axis, mine.start, mine.stop - mine.start)
        return part.contiguous().to(self._group.device)


def _objections(architecture: str, config: PretrainedConfig, tp_size: int) -> Iterator[str]:
    if architecture not in _SPLIT_MODELS:
        yield f"tensor parallelism serves {', '.join(_SPLIT_MODELS)}"
        return
    # Whole heads stay together, and a key head goes with the query heads that use it.
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, what)
        if count % tp_size:
            yield f"its {what} {count} cannot be divided by tensor_parallel_size {tp_size}"
    if config.vocab_size <= (tp_size - 1) * -(-config.vocab_size // tp_size):
        yield f"its {config.vocab_size} tokens are too few for tensor_parallel_size {tp_size}"
