"""How much memory a base model with its adapters takes, from its config.json alone.

Weights, KV cache and adapter slots are the sums that the engine allocates. Working memory is an
estimate, on the safe side.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import SchedulerConfig
from engine.models.injection import find_targets
from engine.models.registry import max_model_len, model_class, read_config

# Of the device's memory; the rest is for the allocator's gaps and the libraries' own needs.
_USABLE = 0.9
_FLOAT32_BYTES = 4
# Logits, their sorted copy, and probabilities exist at the same time.
_LOGITS_COPIES = 3


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A module that adapters may target."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What one base model takes, in bytes of the dtype that it is served in."""

    weight_bytes: int
    kv_bytes_per_token: int
    dtype_bytes: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    linears: tuple[LinearSize, ...]

    def rank_bytes(self, targets: Collection[str]) -> int:
        """An adapter's bytes for each of its ranks; empty ``targets`` means all linear layers."""
        chosen = [
            linear
            for linear in self.linears
            if not targets or linear.name.rpartition(".")[2] in targets
        ]
        if not chosen:
            names = sorted({linear.name.rpartition(".")[2] for linear in self.linears})
            raise ValueError(f"the model has no such modules; it has {', '.join(names)}")
        return sum(n.in_features + n.out_features for n in chosen) * self.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be served. ``memory_bytes`` is one replica's device; ``context`` in tokens."""

    num_adapters: int
    rank: int
    max_loras: int
    memory_bytes: int
    context: int
    targets: tuple[str, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What one replica needs, and what is left for requests. ``fits`` is False if nothing is."""

    weight_bytes: int
    slot_bytes: int
    working_bytes: int
    kv_cache_bytes: int
    kv_tokens: int
    concurrent_requests: int
    adapter_bytes: int
    all_adapters_bytes: int
    max_lora_rank: int
    fits: bool


def measure_model(directory: Path) -> ModelSize:
    """Read a base model's sizes; UnsupportedModelError if it is not served."""
    config = read_config(directory)
    cls = model_class(config)
    dtype = config.dtype or torch.float32
    with torch.device("meta"):
        model = cls(config)
    model.tie_weights()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    targets = find_targets(model, directory.name)
    return ModelSize(
        weight_bytes=sum(p.numel() for p in model.parameters()) * dtype.itemsize,
        kv_bytes_per_token=2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize,
        dtype_bytes=dtype.itemsize,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len(config, None),
        linears=tuple(
            LinearSize(name, target.in_features, target.out_features)
            for name, target in targets.items()
            if target.kind.is_linear and name != "lm_head"
        ),
    )


def plan(model: ModelSize, load: Load) -> Sizing:
    """Divide one replica's device memory."""
    rank_bytes = model.rank_bytes(load.targets)
    slot_bytes = load.max_loras * load.rank * rank_bytes
    working_bytes = _working_bytes(model, load.scheduler)
    left = int(load.memory_bytes * _USABLE) - model.weight_bytes - slot_bytes - working_bytes
    kv_cache_bytes = max(0, left)
    kv_tokens = kv_cache_bytes // model.kv_bytes_per_token
    return Sizing(
        weight_bytes=model.weight_bytes,
        slot_bytes=slot_bytes,
        working_bytes=working_bytes,
        kv_cache_bytes=kv_cache_bytes,
        kv_tokens=kv_tokens,
        concurrent_requests=kv_tokens // load.context,
        adapter_bytes=load.rank * rank_bytes,
        all_adapters_bytes=load.num_adapters * load.rank * rank_bytes,
        max_lora_rank=load.rank,
        fits=kv_tokens >= load.context,
    )


def _working_bytes(model: ModelSize, scheduler: SchedulerConfig) -> int:
    tokens = scheduler.max_num_batched_tokens
    activations = tokens * (2 * model.intermediate_size + 6 * model.hidden_size)
    logits = scheduler.max_num_seqs * model.vocab_size * _FLOAT32_BYTES * _LOGITS_COPIES
    return activations * model.dtype_bytes + logits


def _intermediate_size(config: Any) -> int:
    found = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(found or 4 * config.hidden_size)
