"""Every spelling of a tensor's name that PEFT has used."""

import pytest

from engine.lora.tensor_names import TensorName, TensorRole, parse_tensor_name

M = "model.layers.0.self_attn.q_proj"
P = f"base_model.model.{M}"

NAMES = {
    f"{P}.lora_A.weight": TensorName(M, TensorRole.LORA_A),
    f"{P}.lora_B.weight": TensorName(M, TensorRole.LORA_B),
    f"{M}.lora_A.weight": TensorName(M, TensorRole.LORA_A),
    f"{P}.lora_A.default.weight": TensorName(M, TensorRole.LORA_A, "default"),
    f"{P}.lora_B.my-sql.weight": TensorName(M, TensorRole.LORA_B, "my-sql"),
    f"{P}.lora_B.bias": TensorName(M, TensorRole.LORA_BIAS),
    f"{P}.lora_B.default.bias": TensorName(M, TensorRole.LORA_BIAS, "default"),
    f"{P}.lora_magnitude_vector": TensorName(M, TensorRole.MAGNITUDE),
    f"{P}.lora_magnitude_vector.default.weight": TensorName(M, TensorRole.MAGNITUDE, "default"),
    "base_model.model.wte.lora_embedding_A": TensorName("wte", TensorRole.EMBEDDING_A),
    "base_model.model.wte.lora_embedding_B.x": TensorName("wte", TensorRole.EMBEDDING_B, "x"),
    f"{P}.lora_diag": TensorName(M, TensorRole.OTHER_LORA),
    f"{P}.lora_A": TensorName(M, TensorRole.OTHER_LORA),
    "base_model.model.wte.token_adapter.trainable_tokens_delta": TensorName(
        "wte", TensorRole.TRAINED_TOKENS
    ),
    "base_model.model.lm_head.base_layer.weight": TensorName("lm_head", TensorRole.MODULE_WEIGHT),
    "base_model.model.lm_head.modules_to_save.weight": TensorName(
        "lm_head", TensorRole.MODULE_WEIGHT
    ),
    "base_model.model.lm_head.weight": TensorName("lm_head", TensorRole.MODULE_WEIGHT),
    f"{P}.base_layer.bias": TensorName(M, TensorRole.MODULE_BIAS),
}


@pytest.mark.parametrize(("key", "expected"), NAMES.items())
def test_names_of_peft_are_understood(key: str, expected: TensorName) -> None:
    assert parse_tensor_name(key) == expected


@pytest.mark.parametrize("key", ["", "weight", "stray", f"{P}.lora_x.a.b"])
def test_other_names_are_not(key: str) -> None:
    assert parse_tensor_name(key) is None
