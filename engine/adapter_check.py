"""Tells whether an adapter is served exactly, without loading the base model.

Knows the base model's shapes from its config.json alone, and runs the very checks that the engine
runs when it loads an adapter.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from adapters import LoRARequest
from engine.config import DType, LoRAConfig
from engine.lora.adapter import AdapterInfo, load_adapter
from engine.lora.adapter_tokenizer import BaseTokenizer
from engine.lora.targets import ModelTargets
from engine.models.injection import find_targets
from engine.models.registry import model_class, read_config
from engine.tokenizer import load_tokenizer


def check_adapter(
    request: LoRARequest, model: Path, limits: LoRAConfig, *, dtype: DType = "auto"
) -> AdapterInfo:
    """Describe the adapter as the engine would serve it; AdapterError says why it would not.

    ``model`` is the base model's directory; UnsupportedModelError if that itself is not served.
    """
    config = read_config(model)
    served_dtype = _torch_dtype(config, dtype)
    weights = _BaseWeights(model, config, served_dtype)
    adapter = load_adapter(
        request,
        _targets(model, config),
        limits,
        served_dtype,
        base_weight=weights.read,
        tokenizer=BaseTokenizer(load_tokenizer(model).backend_tokenizer, model),
    )
    return adapter.info


def _targets(model: Path, config: PretrainedConfig) -> ModelTargets:
    cls = model_class(config)
    with torch.device("meta"):
        return find_targets(cls(config), model.name)


def _torch_dtype(config: PretrainedConfig, dtype: DType) -> torch.dtype:
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    own: torch.dtype | None = config.dtype
    return torch.float32 if own is None else own


class _BaseWeights:
    """The base model's parameters by module, each read only when it is asked for."""

    def __init__(self, model: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
        self._model = model
        self._is_tied = bool(config.tie_word_embeddings)
        self._dtype = dtype

    def read(self, module: str, parameter: str = "weight") -> torch.Tensor | None:
        stored = self._read(f"{module}.{parameter}")
        if stored is None and self._is_tied and (module, parameter) == ("lm_head", "weight"):
            stored = self._read("model.embed_tokens.weight")
        return None if stored is None else stored.to(self._dtype)

    def _read(self, key: str) -> torch.Tensor | None:
        index = self._model / "model.safetensors.index.json"
        name: str | None = "model.safetensors"
        if index.is_file():
            name = json.loads(index.read_text())["weight_map"].get(key)
        if name is None or not (self._model / name).is_file():
            return None
        with safe_open(self._model / name, framework="pt") as file:
            if key not in file.keys():  # noqa: SIM118
                return None
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor
