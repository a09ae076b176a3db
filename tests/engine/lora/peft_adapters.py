"""Tiny base models and adapters made by PEFT itself, which is the oracle of these tests."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adapters import LoRARequest
from engine.lora.targets import LoRATarget, ModelTargets, TargetKind

NUM_LAYERS = 3


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=NUM_LAYERS, n_head=2, vocab_size=40))


def targets_of(model: PreTrainedModel) -> ModelTargets:
    """The facts about the model that the engine keeps, found independently of the engine."""
    modules: dict[str, LoRATarget] = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            modules[name] = LoRATarget(name, module.nx, module.nf, TargetKind.CONV1D)
        elif isinstance(module, nn.Linear):
            kind = TargetKind.LM_HEAD if name == "lm_head" else TargetKind.LINEAR
            modules[name] = LoRATarget(name, module.in_features, module.out_features, kind)
        elif isinstance(module, nn.Embedding):
            size = (module.num_embeddings, module.embedding_dim)
            modules[name] = LoRATarget(name, *size, TargetKind.EMBEDDING)
    return ModelTargets(
        modules,
        base_model="tiny",
        architecture=type(model).__name__,
        input_embedding=next(n for n, target in modules.items() if _is_embedding(target)),
    )


def _is_embedding(target: LoRATarget) -> bool:
    return target.kind is TargetKind.EMBEDDING


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that PEFT saved, beside the model that PEFT itself loaded it into."""

    path: Path
    targets: ModelTargets
    base: PreTrainedModel
    peft: PeftModel

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(lora_name="tiny-adapter", lora_path=str(self.path))

    def base_weight(self, name: str, parameter: str) -> torch.Tensor | None:
        module = dict(self.base.named_modules()).get(name)
        weight = getattr(module, parameter, None)
        if isinstance(module, Conv1D) and parameter == "weight":
            weight = module.get_parameter("weight").T
        return weight if isinstance(weight, torch.Tensor) else None

    def delta_weights(self) -> dict[str, torch.Tensor]:
        """What PEFT adds to each module's weight, as [out, in]."""
        prefix = "base_model.model."
        deltas: dict[str, torch.Tensor] = {}
        for name, module in self.peft.named_modules():
            if hasattr(module, "get_delta_weight") and "default" in module.lora_A:
                delta = module.get_delta_weight("default").detach()
                deltas[name.removeprefix(prefix)] = delta.T if module.fan_in_fan_out else delta
        return deltas


def make_adapter(
    path: Path,
    make_base: Callable[[], PreTrainedModel] = tiny_llama,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> PeftAdapter:
    """Let PEFT build and save an adapter with random A and B, then load it into a fresh base."""
    settings = {"r": 4, "lora_alpha": 10, "task_type": "CAUSAL_LM", **config}
    settings.setdefault("target_modules", ["q_proj", "v_proj"])
    base = make_base()
    targets = targets_of(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = get_peft_model(make_base(), LoraConfig(**settings))
        torch.manual_seed(1)
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)
                parameter.data = parameter.data.to(dtype)
        trained.save_pretrained(str(path))
        loaded = PeftModel.from_pretrained(make_base(), str(path), autocast_adapter_dtype=False)
    return PeftAdapter(path, targets, base, loaded)


def read_config(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    return fields


def write_config(path: Path, fields: object) -> None:
    (path / "adapter_config.json").write_text(json.dumps(fields))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path / "adapter_model.safetensors")
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path / "adapter_model.safetensors")
