"""What the rest of the engine may know of the base model."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts of one loaded model, fixed at start.

    ``windows`` has one entry for each layer: how many positions it sees, None for all. Layers may
    differ in their KV shape; ``num_kv_heads`` and ``head_dim`` are the first layer's.
    ``hidden_size`` is the width of the final hidden states, None where they cannot be seen.
    """

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    hf_config: PretrainedConfig
    hidden_size: int | None = None
