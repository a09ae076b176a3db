"""Tiny random checkpoints of several architectures, from a fixed seed."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

# Odd widths and head counts on purpose: nothing may rely on powers of two.
_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GEMMA = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
}

# Architectures that the engine serves.
TINY_MODELS: dict[str, dict[str, object]] = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": _SIZES,
    "mistral": _SIZES | {"sliding_window": 7},
    "phi3": _SIZES,
    "gemma2": _SIZES | _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": _SIZES | _GEMMA,
    "gpt2": {
        "vocab_size": 131,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}

# Architectures whose attention the engine finds, when it runs it, to be more than it offers.
_REFUSED_MODELS: dict[str, dict[str, object]] = {
    "bert": _SIZES,
    "diffllama": _SIZES,
    "gpt_oss": _SIZES | {"num_local_experts": 2},
}

MakeModel = Callable[..., Path]


def save_tiny_model(
    path: Path, model_type: str, *, dtype: torch.dtype, **overrides: object
) -> None:
    """Write a random checkpoint of `model_type` whose weights are large enough to matter."""
    config = AutoConfig.for_model(
        model_type, **((TINY_MODELS | _REFUSED_MODELS)[model_type] | overrides)
    )
    save_random_model(path, config, dtype)


def save_random_model(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Write a random checkpoint for `config` whose weights are large enough to matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # A fresh model's norms are all ones and its biases zero, which would hide errors.
            spread = 0.1 if parameter.dim() == 1 else 0.6 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.to(dtype).save_pretrained(path)
