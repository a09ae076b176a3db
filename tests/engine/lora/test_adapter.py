"""Adapters that PEFT wrote must change each module's weight by exactly what PEFT adds to it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import LoRAConfig
from engine.lora.adapter import LoRAAdapter, load_adapter
from tests.engine.lora.peft_adapters import PeftAdapter, make_adapter, tiny_gpt2, tiny_llama

LIMITS = LoRAConfig()


def load(adapter: PeftAdapter, dtype: torch.dtype = torch.float32) -> LoRAAdapter:
    return load_adapter(
        adapter.request, adapter.targets, LIMITS, dtype, base_weight=adapter.base_weight
    )


def assert_same_deltas(loaded: LoRAAdapter, oracle: PeftAdapter, atol: float = 1e-5) -> None:
    expected = oracle.delta_weights()
    assert loaded.modules.keys() == expected.keys()
    for name, module in loaded.modules.items():
        delta = module.lora_b.float().T @ module.lora_a.float()
        assert expected[name].abs().max() > 0.1, "a delta of zero would prove nothing"
        torch.testing.assert_close(delta, expected[name].float(), atol=atol, rtol=atol)


LLAMA_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "alpha_equals_rank_no_more": {"r": 8, "lora_alpha": 3},
    "fractional_alpha": {"lora_alpha": 2.5},
    "rank_pattern_suffix": {"rank_pattern": {"q_proj": 7}},
    "rank_pattern_full_name": {"rank_pattern": {"model.layers.1.self_attn.v_proj": 2}},
    "rank_pattern_regex": {"rank_pattern": {r"layers\.[12]\..*q_proj": 3, "q_proj": 6}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 31}},
    "both_patterns_rslora": {
        "rank_pattern": {r"^model\.layers\.0\..*": 5},
        "alpha_pattern": {r".*\.2\.self_attn.q_proj": 77, "v_proj": 5},
        "use_rslora": True,
    },
    "regex_targets": {"target_modules": r".*\.(0|2)\.mlp\.(up|down)_proj"},
    "all_linear": {"target_modules": "all-linear"},
    "all_linear_exclude": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "exclude_regex": {"exclude_modules": r".*\.1\..*"},
    "full_names": {"target_modules": ["model.layers.0.self_attn.k_proj", "gate_proj"]},
    "one_layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "layers_pattern_list": {"layers_to_transform": [2], "layers_pattern": ["h", "layers"]},
    "layer_and_full_name": {
        "target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"],
        "layers_to_transform": [2],
    },
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "wrong_fan_in_fan_out": {"fan_in_fan_out": True},
}


@pytest.mark.parametrize("config", LLAMA_CONFIGS.values(), ids=LLAMA_CONFIGS.keys())
def test_deltas_equal_those_of_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    oracle = make_adapter(tmp_path, **config)
    assert_same_deltas(load(oracle), oracle)


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_conv1d_deltas_equal_those_of_peft(tmp_path: Path, fan_in_fan_out: bool) -> None:
    oracle = make_adapter(
        tmp_path,
        tiny_gpt2,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=fan_in_fan_out,
    )
    assert_same_deltas(load(oracle), oracle)


def test_lm_head_of_a_tied_model_changes_the_logits_alone(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path, lambda: tiny_llama(tied=True), target_modules=["lm_head"])
    assert_same_deltas(load(oracle), oracle)
