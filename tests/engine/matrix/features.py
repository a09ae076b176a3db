"""The adapters of the matrix: what PEFT is asked for, and how the engine must answer.

A feature is served when ``refused`` is None; otherwise the refusal must match it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine.matrix import edits
from tests.engine.matrix.architectures import SIZES, Architecture

Config = Callable[[Architecture], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row of the matrix; ``lacks`` names what an architecture does not have for it.

    ``store`` changes what PEFT saved before PEFT reads it back for the truth; ``edit`` changes only
    what the engine reads, the way other tools or mistakes would. ``converted`` adapters are trained
    against changed base weights and saved through PEFT's conversion to a plain delta.
    """

    config: Config
    store: Callable[[Path], None] | None = None
    edit: Callable[[Path], None] | None = None
    converted: bool = False
    refused: str | None = None
    lacks: Callable[[Architecture], str | None] = lambda arch: None
    with_rope: bool = False


# What an activated LoRA waits for; the matrix' prompt holds it twice.
INVOCATION = (7, 2)


def _attention(**config: Any) -> Config:
    return lambda arch: {"target_modules": list(arch.attention), **config}


def _linears(**config: Any) -> Config:
    return lambda arch: {"target_modules": [*arch.attention, *arch.mlp], **config}


def _experts(arch: Architecture) -> str | None:
    return None if arch.model_type == "qwen3_moe" else "no experts"


def _no_fused_experts(arch: Architecture) -> str | None:
    return "PEFT includes the experts" if arch.model_type == "qwen3_moe" else None


def _no_conv1d(arch: Architecture) -> str | None:
    return "PEFT cannot convert it on Conv1D" if arch.model_type == "gpt2" else None


def _no_inner_model(arch: Architecture) -> str | None:
    is_inner = arch.layers.startswith("model.")
    return None if is_inner else "no multimodal model has its text part under this name"


def _expression(arch: Architecture) -> str:
    """What Unsloth writes: the text part of any model, or the layers of a text model."""
    parts, linears = "(?:self_attn|attn|mlp)", f"(?:{'|'.join(arch.attention)})"
    return (
        rf"(?:.*?(?:language|text).*?{parts}.*?{linears}.*?)"
        rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.{parts}\.{linears})"
    )


def _untied(arch: Architecture) -> str | None:
    return "embedding and head share one weight" if arch.is_tied else None


def _tied(arch: Architecture) -> str | None:
    return None if arch.is_tied else "embedding and head have weights of their own"


# What every version of PEFT has written, and all that matters for a plain adapter.
_OLD_FIELDS = ("peft_type", "r", "lora_alpha", "target_modules")

SCALING = {
    "plain": Feature(config=_attention(), with_rope=True),
    "rank 1": Feature(config=_linears(r=1, lora_alpha=3)),
    "rank 64": Feature(config=_attention(r=64, lora_alpha=16)),
    "rank 509": Feature(config=_attention(r=509, lora_alpha=90)),
    "rsLoRA": Feature(config=_linears(use_rslora=True, r=6, lora_alpha=5), with_rope=True),
    "rank_pattern, alpha_pattern": Feature(
        config=lambda arch: {
            "target_modules": [*arch.attention, *arch.mlp],
            "rank_pattern": {arch.attention[0]: 13},
            "alpha_pattern": {arch.mlp[-1]: 20, rf".*\.1\..*{arch.attention[-1]}": 2},
        }
    ),
}

WHERE = {
    "all-linear": Feature(
        config=lambda arch: {"target_modules": "all-linear"},
        lacks=_no_fused_experts,
        with_rope=True,
    ),
    "all-linear with experts": Feature(
        config=lambda arch: {"target_modules": "all-linear"},
        refused="target_parameters=.* asks for LoRA on bare parameters",
        lacks=_experts,
    ),
    "MLP only": Feature(config=lambda arch: {"target_modules": list(arch.mlp)}),
    "regular expression": Feature(
        config=lambda arch: {"target_modules": rf".*\.1\..*({'|'.join(arch.attention)})"}
    ),
    "layers_to_transform": Feature(
        config=_attention(layers_to_transform=[1]),
    ),
    "layers_pattern": Feature(
        config=lambda arch: {
            "target_modules": list(arch.attention),
            "layers_to_transform": [0],
            "layers_pattern": arch.layers.rpartition(".")[2],
        }
    ),
    "exclude_modules": Feature(
        config=lambda arch: {"target_modules": "all-linear", "exclude_modules": [arch.mlp[-1]]},
        lacks=_no_fused_experts,
    ),
    "lm_head": Feature(config=lambda arch: {"target_modules": [*arch.attention, "lm_head"]}),
    "embedding": Feature(config=lambda arch: {"target_modules": [*arch.attention, arch.embedding]}),
    "embedding alone": Feature(config=lambda arch: {"target_modules": [arch.embedding], "r": 3}),
    "target_parameters": Feature(
        config=lambda arch: {
            "target_modules": list(arch.attention),
            "target_parameters": ["mlp.experts.down_proj"],
        },
        refused="target_parameters=.* asks for LoRA on bare parameters",
        lacks=_experts,
    ),
    "experts by the names of their linears": Feature(
        config=lambda arch: {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
        refused="target_parameters=.* asks for LoRA on bare parameters",
        lacks=_experts,
    ),
}

WHAT = {
    "bias lora_only": Feature(config=_linears(bias="lora_only")),
    "bias all": Feature(config=_attention(bias="all")),
    "lora_bias": Feature(config=_linears(lora_bias=True)),
    "DoRA": Feature(config=_linears(use_dora=True)),
    "DoRA, rsLoRA, patterns, bias": Feature(
        config=lambda arch: {
            "target_modules": [*arch.attention, *arch.mlp],
            "use_dora": True,
            "use_rslora": True,
            "bias": "all",
            "rank_pattern": {arch.attention[0]: 3},
        }
    ),
    "lora_bias, rsLoRA, patterns, head": Feature(
        config=lambda arch: {
            "target_modules": [*arch.attention, "lm_head"],
            "lora_bias": True,
            "use_rslora": True,
            "rank_pattern": {"lm_head": 2},
        }
    ),
    "DoRA on head and embedding": Feature(
        config=lambda arch: {
            "target_modules": [arch.embedding, "lm_head", *arch.mlp],
            "use_dora": True,
        }
    ),
    "modules_to_save lm_head": Feature(config=_attention(modules_to_save=["lm_head"])),
    "modules_to_save embedding": Feature(
        config=lambda arch: {
            "target_modules": list(arch.mlp),
            "modules_to_save": [arch.embedding],
        }
    ),
    "modules_to_save embedding and lm_head": Feature(
        config=lambda arch: {
            "target_modules": [*arch.attention, *arch.mlp],
            "modules_to_save": [arch.embedding, "lm_head"],
            "use_dora": True,
        }
    ),
    "modules_to_save norms": Feature(
        config=lambda arch: {
            "target_modules": list(arch.attention),
            "modules_to_save": list(arch.norms),
        }
    ),
    "modules_to_save a linear": Feature(
        config=lambda arch: {
            "target_modules": list(arch.attention),
            "modules_to_save": [arch.mlp[-1]],
        }
    ),
    "trainable_token_indices": Feature(config=_attention(trainable_token_indices=[5, 3, 77])),
    "trainable_token_indices, embedding and head": Feature(
        config=lambda arch: {
            "target_modules": list(arch.attention),
            "trainable_token_indices": {arch.embedding: [9, 40], "lm_head": [9, 2, 100]},
        },
        lacks=_untied,
    ),
    "trainable_token_indices, saved norm": Feature(
        config=lambda arch: {
            "target_modules": list(arch.attention),
            "trainable_token_indices": [5, 3, 77],
            "modules_to_save": [arch.norms[0]],
        }
    ),
    "trained and tied": Feature(
        config=_attention(modules_to_save=["lm_head"], ensure_weight_tying=True),
        refused="ensure_weight_tying=True asks for adapters shared between tied embeddings",
        lacks=_tied,
    ),
    "resized vocabulary": Feature(
        config=_attention(modules_to_save=["lm_head"]),
        edit=edits.add_head_rows,
        refused="resized vocabular",
    ),
    "a token of its own": Feature(
        config=_attention(),
        edit=edits.save_tokenizer("<tool>"),
        refused="its tokenizer is not the base model's: token '<tool>' has id 13.,",
    ),
    "aLoRA": Feature(
        config=_linears(alora_invocation_tokens=list(INVOCATION)),
    ),
    "aLoRA, rsLoRA, lora_bias, head": Feature(
        config=lambda arch: {
            "target_modules": [*arch.attention, "lm_head"],
            "alora_invocation_tokens": list(INVOCATION),
            "use_rslora": True,
            "lora_bias": True,
        }
    ),
}

INITIALISATIONS = {
    "gaussian": Feature(config=_attention(init_lora_weights="gaussian")),
    "orthogonal": Feature(config=_attention(init_lora_weights="orthogonal", r=4)),
    "PiSSA, converted": Feature(
        config=_attention(init_lora_weights="pissa"), converted=True, lacks=_no_conv1d
    ),
    "OLoRA, converted": Feature(
        config=_attention(init_lora_weights="olora"), converted=True, lacks=_no_conv1d
    ),
    "PiSSA": Feature(
        config=_attention(), edit=edits.claim_init("pissa"), refused="convert the adapter with PEFT"
    ),
    "OLoRA": Feature(
        config=_attention(), edit=edits.claim_init("olora"), refused="convert the adapter with PEFT"
    ),
    "LoftQ": Feature(
        config=_attention(), edit=edits.claim_init("loftq"), refused="convert the adapter with PEFT"
    ),
    "EVA": Feature(config=_attention(), edit=edits.claim_init("eva")),
    "CorDA": Feature(
        config=_attention(), edit=edits.claim_init("corda"), refused="convert the adapter with PEFT"
    ),
    "LoRA-GA": Feature(
        config=_attention(),
        edit=edits.claim_init("lora_ga"),
        refused="convert the adapter with PEFT",
    ),
    "MiCA": Feature(config=_attention(init_lora_weights="mica")),
    "IA3": Feature(
        config=_attention(), edit=edits.claim_type("IA3"), refused="peft_type 'IA3' is not served"
    ),
    "prompt tuning": Feature(
        config=_attention(),
        edit=edits.claim_type("PROMPT_TUNING"),
        refused="peft_type 'PROMPT_TUNING' is not served",
    ),
    "unknown field": Feature(
        config=_attention(),
        edit=edits.set_field("use_new_magic", True),
        refused="field 'use_new_magic' with value True is unknown",
    ),
}

FILES = {
    "adapter name in keys": Feature(config=_linears(), edit=edits.insert_adapter_name),
    "keys without prefix": Feature(config=_linears(), edit=edits.drop_prefix),
    "shards": Feature(config=_linears(), edit=edits.split_in_shards),
    "text part of a multimodal model": Feature(
        config=_linears(use_dora=True), edit=edits.rename_as_multimodal, lacks=_no_inner_model
    ),
    "text part of an older multimodal model": Feature(
        config=lambda arch: {"target_modules": [*arch.attention, arch.embedding, "lm_head"]},
        edit=edits.rename_as_older_multimodal,
    ),
    "the base model's tokenizer beside it": Feature(
        config=_attention(), edit=edits.save_tokenizer()
    ),
    "PEFT 0.3": Feature(
        config=_attention(),
        edit=edits.keep_fields(
            *_OLD_FIELDS,
            "base_model_name_or_path",
            "bias",
            "fan_in_fan_out",
            "inference_mode",
            "init_lora_weights",
            "lora_dropout",
            "modules_to_save",
            "task_type",
            enable_lora=None,
            merge_weights=False,
        ),
    ),
    "torchtune": Feature(
        config=_linears(),
        edit=edits.keep_fields(*_OLD_FIELDS, base_model_name_or_path="base"),
    ),
    "Unsloth": Feature(
        config=lambda arch: {"target_modules": _expression(arch)},
        edit=edits.set_field(
            "auto_mapping",
            {
                "base_model_class": "LlamaForCausalLM",
                "parent_library": "transformers.models.llama.modeling_llama",
                "unsloth_fixed": True,
            },
        ),
        lacks=_no_inner_model,
    ),
    "float16": Feature(config=_linears(), store=edits.store_as(torch.float16)),
    "bfloat16": Feature(config=_linears(), store=edits.store_as(torch.bfloat16)),
    "float8": Feature(config=_linears(), store=edits.store_as(torch.float8_e4m3fn)),
    "float8, short mantissa": Feature(config=_linears(), store=edits.store_as(torch.float8_e5m2)),
}

MISTAKES = {
    "wrong layer index": Feature(
        config=_attention(),
        edit=edits.rename(".1.", f".{SIZES['num_hidden_layers'] + 7}."),
        refused="which the base model .* does not have",
    ),
    "wrong width": Feature(
        config=_attention(), edit=edits.narrow, refused="has shape .* but configuration and base"
    ),
    "wrong prefix": Feature(
        config=_attention(),
        edit=edits.rename("base_model.model.", "base_model.model.student."),
        refused="which the base model .* does not have",
    ),
    "changes nothing": Feature(
        config=_attention(), edit=edits.zero_lora_b, refused="would change nothing"
    ),
    "tensor of no use": Feature(config=_attention(), edit=edits.add_stray_tensor, refused="stray"),
}

GROUPS = {
    "Scaling": SCALING,
    "Where": WHERE,
    "What": WHAT,
    "Initialisation and method": INITIALISATIONS,
    "Files": FILES,
    "Mistakes": MISTAKES,
}
FEATURES: dict[str, Feature] = {
    name: feature for group in GROUPS.values() for name, feature in group.items()
}
