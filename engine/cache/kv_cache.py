"""The tensors of the paged KV cache, and how many blocks fit in memory.

Knows shapes and bytes. Knows nothing of which block belongs to whom.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.config import CacheConfig
from kernels.metadata import KVScales


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one layer: for each position two of [num_kv_heads, head_dim].

    A quantised cache has a float32 scale for each vector.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def is_quantised(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    def quantised(self) -> "KVShape":
        """The same in eight-bit floats."""
        return replace(self, dtype=torch.float8_e4m3fn)

    def block_bytes(self, block_size: int) -> int:
        scale_bytes = torch.float32.itemsize if self.is_quantised else 0
        vector_bytes = self.head_dim * self.dtype.itemsize + scale_bytes
        return 2 * block_size * self.num_kv_heads * vector_bytes


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's key and value cache, each [num_blocks, block_size, Hkv, D], and their scales."""

    key: torch.Tensor
    value: torch.Tensor
    scales: KVScales | None = None


def num_blocks_that_fit(layers: Sequence[KVShape], config: CacheConfig) -> int:
    """Return ``num_blocks``, or how many blocks of all layers ``memory_bytes`` holds."""
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = sum(layer.block_bytes(config.block_size) for layer in layers)
    num_blocks = config.memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(f"one KV block takes {block_bytes} bytes, more than {config}")
    return num_blocks


def allocate_kv(layer: KVShape, num_blocks: int, block_size: int, device: torch.device) -> LayerKV:
    """Allocate one layer's cache.

    Zeroed, so that a position never written cannot turn a masked score into NaN. On a CPU the
    pages take no memory until they are written.
    """
    shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
    key = torch.zeros(shape, dtype=layer.dtype, device=device)
    if not layer.is_quantised:
        return LayerKV(key, torch.zeros_like(key))
    table = torch.zeros(shape[:3], dtype=torch.float32, device=device)
    return LayerKV(key, torch.zeros_like(key), KVScales(table, torch.zeros_like(table)))
