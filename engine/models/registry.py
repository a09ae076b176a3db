"""Decides whether a base model can be served exactly, and says why when it cannot.

Knows transformers configs and classes. Knows nothing of weights or devices. What a config does not
tell is checked later, by running the model (``engine.models.isolation``).
"""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModelError

# The kinds of layer whose whole state is a key and a value per position.
_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Rotary frequencies of these kinds depend on the longest sequence of the batch beyond this length.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def read_config(model: Path) -> PretrainedConfig:
    """Read the model's config.json; code that ships with a checkpoint is never run."""
    if not (model / "config.json").is_file():
        raise UnsupportedModelError(f"{model} is not a directory with a config.json")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UnsupportedModelError(
            f"{model}: transformers cannot read config.json: {error}"
        ) from error


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the transformers class that serves `config`, or raise UnsupportedModelError."""
    for reason in _config_objections(config):
        raise UnsupportedModelError(f"{config.model_type}: {reason}")
    try:
        cls: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"{config.model_type}: transformers has no causal language model for it"
        ) from None
    for reason in _class_objections(cls, config):
        raise UnsupportedModelError(f"{cls.__name__}: {reason}")
    return cls


def max_model_len(config: PretrainedConfig, wanted: int | None) -> int:
    """Return the longest sequence served: `wanted`, or all that the model computes exactly."""
    trained = getattr(config, "max_position_embeddings", None)
    limits: list[int] = [trained] if trained is not None else []
    for rope in _rope_settings(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE and original is not None:
            limits.append(original)
    if wanted is None:
        if not limits:
            raise UnsupportedModelError(f"{config.model_type}: set max_model_len, config has none")
        return min(limits)
    if limits and wanted > min(limits):
        raise UnsupportedModelError(
            f"{config.model_type}: max_model_len {wanted} exceeds {min(limits)}, the longest "
            "sequence that the model's position embeddings compute independently of the batch"
        )
    return wanted


def _config_objections(config: PretrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"
    if getattr(config, "quantization_config", None) is not None:
        yield "quantised checkpoints are not supported"
    if config.get_text_config() is not config:
        yield "multimodal models are not supported"
    if not getattr(config, "is_causal", True):
        yield "attention is not causal"
    other = set(getattr(config, "layer_types", None) or ()) - _PAGED_LAYER_TYPES
    if other:
        yield f"layers of type {', '.join(sorted(other))} are not supported"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "layers that share another layer's keys and values are not supported"


def _class_objections(cls: type[PreTrainedModel], config: PretrainedConfig) -> Iterator[str]:
    architectures = getattr(config, "architectures", None) or [cls.__name__]
    if cls.__name__ not in architectures:
        yield f"the checkpoint is a {', '.join(architectures)}"
    if not getattr(cls, "_supports_attention_backend", False):
        yield "its attention does not go through transformers' AttentionInterface"
    # Flash attention sees no mask either: a model that supports it says all in keyword arguments.
    if not getattr(cls, "_supports_flash_attn", False):
        yield "its attention needs masks beyond causal and sliding windows"
    if getattr(cls, "_is_stateful", False):
        yield "it keeps state besides keys and values"
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        yield "it cannot compute logits for chosen tokens only"


def _rope_settings(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary settings: one for the model, or one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    yield from nested or [settings]
