"""Adapters of a multimodal model's text part, served on the text model alone."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import ModulesToSaveWrapper
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from adapters import LoRARequest
from engine.config import LoRAConfig
from engine.errors import InvalidAdapterError
from engine.lora.adapter import LoRAAdapter, load_adapter
from engine.models.injection import find_targets
from tests.engine.lora.peft_adapters import read_tensors, write_tensors

TEXT = Gemma3TextConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
VISION = SiglipVisionConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "expression": {"target_modules": r".*language_model\..*(q_proj|down_proj)"},
    "list, vision excluded": {
        "target_modules": ["q_proj", "o_proj"],
        "exclude_modules": r".*vision.*",
        "use_dora": True,
    },
    "patterns with the other model's names": {
        "target_modules": r".*language_model\..*(q_proj|down_proj)",
        "alpha_pattern": {"language_model.layers.1.self_attn.q_proj": 44},
        "rank_pattern": {r"model\.language_model\.layers\.0\..*": 3},
    },
    "embedding and saved norm": {
        "target_modules": ["model.language_model.embed_tokens"],
        "modules_to_save": ["language_model.norm"],
    },
}


class Multimodal:
    """PEFT's adapter on a multimodal model, and what it adds to each text module."""

    def __init__(self, path: Path, **config: Any) -> None:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = Gemma3ForConditionalGeneration(
                Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
            )
            self.base = {name: p.detach().clone() for name, p in base.named_parameters()}
            peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, **config))
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.3)
            peft.save_pretrained(str(path))
        self.path = path
        self.deltas = {
            _text_name(name): module.get_delta_weight("default").detach()
            for name, module in peft.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        self.saved = {
            _text_name(name): module.modules_to_save["default"].weight.detach()
            for name, module in peft.named_modules()
            if isinstance(module, ModulesToSaveWrapper)
        }

    def base_weight(self, name: str, parameter: str) -> torch.Tensor | None:
        return self.base.get(f"{name.replace('model.', 'model.language_model.', 1)}.{parameter}")

    def load(self) -> LoRAAdapter:
        with torch.device("meta"):
            targets = find_targets(Gemma3ForCausalLM(TEXT), "text")
        request = LoRARequest(lora_name="multimodal", lora_path=str(self.path))
        return load_adapter(
            request, targets, LoRAConfig(), torch.float32, base_weight=self.base_weight
        )


def _text_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace("language_model.", "")


def assert_same(adapter: LoRAAdapter, multimodal: Multimodal) -> None:
    deltas = {name: (m.lora_b.T @ m.lora_a) for name, m in adapter.modules.items()}
    for name, change in adapter.changes.items():
        if change.table is not None and change.expand is not None:
            deltas[name] = change.table @ change.expand
    assert deltas.keys() == multimodal.deltas.keys()
    for name, delta in multimodal.deltas.items():
        torch.testing.assert_close(deltas[name], delta)
    for name, weight in multimodal.saved.items():
        assert torch.equal(adapter.changes[name].weight, weight)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_text_model_gets_what_peft_gave_the_text_part(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    multimodal = Multimodal(tmp_path, **config)
    assert_same(multimodal.load(), multimodal)


def test_the_older_spelling_means_the_same(tmp_path: Path) -> None:
    multimodal = Multimodal(tmp_path, **CONFIGS["list, vision excluded"])
    new, old = "model.language_model.", "language_model.model."
    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, {key.replace(new, old): tensor for key, tensor in tensors.items()})
    assert_same(multimodal.load(), multimodal)


def test_what_changes_the_vision_tower_is_refused(tmp_path: Path) -> None:
    multimodal = Multimodal(tmp_path, target_modules=["q_proj"])
    with pytest.raises(InvalidAdapterError, match=r"model\.vision_tower.*does not have"):
        multimodal.load()


def test_two_spellings_in_one_file_are_refused(tmp_path: Path) -> None:
    multimodal = Multimodal(tmp_path, **CONFIGS["expression"])
    tensors = read_tensors(tmp_path)
    first = next(iter(tensors))
    tensors[first.replace("language_model.", "")] = tensors.pop(first)
    write_tensors(tmp_path, tensors)
    with pytest.raises(InvalidAdapterError, match="does not have"):
        multimodal.load()
