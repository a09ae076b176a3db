"""The base models of the matrix: tiny, random, one for each architecture and rope scaling."""

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
}
# Shorter than the matrix' sequences, so that every one of them is beyond the original context.
ORIGINAL_CONTEXT = 16


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A configuration, and what its modules are called.

    ``rope_only`` models differ from another one in their positions alone: few features are enough.
    """

    model_type: str
    settings: dict[str, Any]
    attention: tuple[str, ...] = ("q_proj", "v_proj")
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    embedding: str = "embed_tokens"
    norms: tuple[str, ...] = ("post_attention_layernorm", "model.norm")
    layers: str = "model.layers"
    rope_only: bool = False
    expected: dict[str, str] = field(default_factory=dict)

    @property
    def is_tied(self) -> bool:
        return bool(self.settings.get("tie_word_embeddings"))


def _rope(**parameters: Any) -> Architecture:
    rope = {"rope_theta": 10000.0, **parameters}
    return Architecture(
        model_type="llama", settings=SIZES | {"rope_parameters": rope}, rope_only=True
    )


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", settings=SIZES),
    "llama, tied": Architecture(
        model_type="llama", settings=SIZES | {"tie_word_embeddings": True, "mlp_bias": True}
    ),
    "mistral": Architecture(model_type="mistral", settings=SIZES | {"sliding_window": 7}),
    "qwen2": Architecture(model_type="qwen2", settings=SIZES),
    "qwen3": Architecture(
        model_type="qwen3", settings=SIZES, norms=("q_norm", "k_norm", "input_layernorm")
    ),
    "qwen3_moe": Architecture(
        model_type="qwen3_moe",
        settings=SIZES
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        # PEFT takes the names of an MLP's linears for those of the experts' parameters.
        mlp=("k_proj", "o_proj"),
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        settings=SIZES
        | _GEMMA
        | {
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        norms=("pre_feedforward_layernorm", "model.norm"),
    ),
    "gemma3_text": Architecture(
        model_type="gemma3_text",
        settings=SIZES | _GEMMA | {"tie_word_embeddings": True},
        norms=("pre_feedforward_layernorm", "model.norm"),
    ),
    "phi3": Architecture(
        model_type="phi3",
        settings=SIZES,
        attention=("qkv_proj",),
        mlp=("gate_up_proj", "down_proj"),
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        settings={
            "vocab_size": 131,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 6,
            "n_positions": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        attention=("c_attn",),
        mlp=("c_fc", "mlp.c_proj"),
        embedding="wte",
        norms=("ln_1", "ln_f"),
        layers="transformer.h",
    ),
    "olmo2": Architecture(model_type="olmo2", settings=SIZES),
    "granite": Architecture(
        model_type="granite",
        settings=SIZES
        | {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        settings=SIZES | {"use_bias": True, "sliding_window": 7, "tie_word_embeddings": True},
        mlp=("c_fc", "c_proj"),
    ),
    "llama, rope linear": _rope(rope_type="linear", factor=8.0),
    "llama, rope llama3": _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL_CONTEXT,
    ),
    "llama, rope yarn": _rope(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_CONTEXT
    ),
    "llama, rope dynamic": _rope(rope_type="dynamic", factor=4.0),
    "llama, rope longrope": _rope(
        rope_type="longrope",
        factor=2.0,
        short_factor=[1.0, 1.1, 1.3, 1.7],
        long_factor=[2.0, 2.5, 3.0, 4.0],
        original_max_position_embeddings=64,
    ),
}
