"""The tensors of the paged KV cache, and how many blocks fit in memory.

Knows shapes and bytes. Knows nothing of which block belongs to whom.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.config import CacheConfig


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one layer: for each position two of [num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        return 2 * block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def num_blocks_that_fit(layers: Sequence[KVShape], config: CacheConfig) -> int:
    """Return ``num_blocks``, or how many blocks of all layers ``memory_bytes`` holds."""
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = sum(layer.block_bytes(config.block_size) for layer in layers)
    num_blocks = config.memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(f"one KV block takes {block_bytes} bytes, more than {config}")
    return num_blocks


def allocate_kv(
    layer: KVShape, num_blocks: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one layer's key and value cache, each [num_blocks, block_size, Hkv, D].

    Zeroed, so that a position never written cannot turn a masked score into NaN. On a CPU the
    pages take no memory until they are written.
    """
    shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
    key = torch.zeros(shape, dtype=layer.dtype, device=device)
    return key, torch.zeros_like(key)
