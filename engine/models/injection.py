"""Puts the engine's layers in place of a transformers model's.

Knows module trees and which classes are known to be equivalent. Knows nothing of batches or of
adapters beyond the names and widths of the modules that they may attach to.
"""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.lora.targets import LoRATarget, ModelTargets, TargetKind
from engine.models.layers import GatedMLP, KernelLinear, KernelRMSNorm

# Classes whose forward is LlamaRMSNorm's or LlamaMLP's to the letter. Others stay as they are:
# a norm that adds one to its weight, say, has the same attributes.
RMS_NORMS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}RMSNorm"
    for family, name in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("mixtral", "Mixtral"),
        ("phi3", "Phi3"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("qwen3_moe", "Qwen3Moe"),
        ("smollm3", "SmolLM3"),
    )
)
GATED_MLPS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}MLP"
    for family, name in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("olmo2", "Olmo2"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("qwen3_moe", "Qwen3Moe"),
        ("smollm3", "SmolLM3"),
    )
)


def find_targets(model: PreTrainedModel, base_model: str) -> ModelTargets:
    """Return every module with weights of `model`, into which no kernels were injected yet."""
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    return ModelTargets(
        modules={target.name: target for target in _targets(model)},
        base_model=base_model,
        architecture=type(model).__name__,
        input_embedding=names[embedding],
        tied_head=names[head] if is_tied else None,
    )


def inject_kernels(model: nn.Module) -> None:
    """Replace linears, norms and MLPs by layers that run ``kernels.ops``."""
    made: dict[nn.Module, nn.Module | None] = {}
    # From the leaves up: an MLP is built of linears that were already replaced.
    for name, module in reversed(list(model.named_modules(remove_duplicate=False))):
        if module not in made:
            made[module] = _kernel_layer(module)
        if (replacement := made[module]) is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)


def _targets(model: PreTrainedModel) -> Iterator[LoRATarget]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        has_bias = getattr(module, "bias", None) is not None
        if type(module) is nn.Linear:
            kind = TargetKind.LM_HEAD if module is head else TargetKind.LINEAR
            yield LoRATarget(name, module.in_features, module.out_features, kind, has_bias)
        elif type(module) is Conv1D:
            yield LoRATarget(name, module.nx, module.nf, TargetKind.CONV1D, has_bias)
        elif isinstance(module, nn.Embedding):
            size = (module.num_embeddings, module.embedding_dim)
            yield LoRATarget(name, *size, TargetKind.EMBEDDING)
        elif _is_norm_of_tokens(model, name, module):
            width = module.get_parameter("weight").shape[0]
            yield LoRATarget(name, width, width, TargetKind.NORM, has_bias)
        elif any(True for _ in module.parameters(recurse=False)):
            yield LoRATarget(name, 0, 0, TargetKind.OTHER, has_bias)


def _is_norm_of_tokens(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether the rows of a norm's input are tokens, in order.

    Norms inside attention may see heads before tokens, unless they are known ones.
    """
    weight = getattr(module, "weight", None)
    if "Norm" not in type(module).__name__ or weight is None or weight.dim() != 1:
        return False
    above = [model.get_submodule(name[:end]) for end, char in enumerate(name) if char == "."]
    is_in_attention = any("Attention" in type(parent).__name__ for parent in above)
    return _path(module) in RMS_NORMS or not is_in_attention


def _kernel_layer(module: nn.Module) -> nn.Module | None:
    """Return the engine's equivalent of `module`, None where there is none."""
    if type(module) is nn.Linear:
        return KernelLinear(module.weight, module.bias)
    if type(module) is Conv1D:
        # Conv1D keeps [in, out]; the kernels read a row of weights for each output.
        weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
        return KernelLinear(weight.T.contiguous(), bias)
    path = _path(module)
    if path in RMS_NORMS:
        assert isinstance(module.weight, torch.Tensor)
        return KernelRMSNorm(module.weight, float(module.variance_epsilon))  # type: ignore[arg-type]
    if path in GATED_MLPS and _is_silu(module.act_fn):
        linears = [getattr(module, f"{name}_proj") for name in ("gate", "up", "down")]
        if all(isinstance(linear, KernelLinear) for linear in linears):
            return GatedMLP(*linears)
    return None


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")
