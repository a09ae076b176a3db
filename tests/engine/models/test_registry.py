"""Which base models are refused, and the longest sequence of those that are not."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from engine.errors import UnsupportedModelError
from engine.models.registry import max_model_len, model_class, read_config


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("mamba", {}, "AttentionInterface|layers of type"),
        ("bloom", {}, "AttentionInterface"),
        ("stablelm", {}, "AttentionInterface"),
        ("qwen3_next", {}, "layers of type linear_attention"),
        ("gemma3", {}, "multimodal"),
        ("vit", {}, "no causal language model"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ("llama", {"is_causal": False}, "not causal"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    ],
)
def test_model_that_would_not_be_served_exactly_is_refused(
    model_type: str, settings: dict[str, object], reason: str
) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        model_class(config)


def test_code_beside_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "surprise", "auto_map": {"AutoConfig": "surprise.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "surprise.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_path_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not a directory"):
        read_config(tmp_path / "absent")


def test_max_model_len_defaults_to_the_trained_length() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=77)
    assert max_model_len(config, None) == 77
    assert max_model_len(config, 50) == 50


def test_max_model_len_beyond_the_trained_length_is_refused() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=77)
    with pytest.raises(UnsupportedModelError, match="78 exceeds 77"):
        max_model_len(config, 78)


def test_rope_that_depends_on_the_batch_limits_the_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=rope,
    )
    assert max_model_len(config, None) == 64
