"""The one list of PEFT's LoraConfig fields and what the engine does with each.

A test compares it with the installed PEFT, so a new field in a new release is a failing test and
a decision here, not a silently ignored setting.
"""

# Read by engine/lora/peft_config.py and honoured as PEFT does.
HONOURED = frozenset(
    {
        "peft_type",
        "task_type",
        "bias",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "alora_invocation_tokens",
        "init_lora_weights",
        "lora_bias",
        "modules_to_save",
        "trainable_token_indices",
        "use_dora",
    }
)

# These change training, bookkeeping or how PEFT merges, never x @ A @ B. The sub-configurations
# of initialisations act through init_lora_weights alone, which is honoured above.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)

# Accepted only when off; the text names the feature in the refusal.
OFF_ONLY = {
    "arrow_config": "Arrow routing between adapters",
    "ensure_weight_tying": "adapters shared between tied embeddings",
    "kasa_config": "KaSA, which changes the base weights",
    "layer_replication": "replicated base layers",
    "megatron_config": "Megatron parallel layers",
    "monteclora_config": "Monteclora sampling",
    "target_parameters": "LoRA on bare parameters",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}

# Initialisations that leave the base weights alone, so that the saved A and B are the whole
# change. The others (pissa, olora, corda, loftq, lora_ga) train against altered base weights.
INITS_ON_UNCHANGED_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")


def is_off(value: object) -> bool:
    """True for the values that PEFT treats as "not used": null, false and empty text or list.

    Not for an empty object: PEFT makes a sub-configuration with its defaults of that.
    """
    return value is None or value is False or value in ("", [])
