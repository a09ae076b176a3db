"""What every op requires of its arguments' shapes. Looks at no value, so nothing waits."""

from collections.abc import Sequence

import torch

from kernels.metadata import KVScales, LoRABatch


def require(condition: bool, op: str, left: torch.Tensor, right: torch.Tensor) -> None:
    """Raise ValueError, naming both shapes, unless the condition holds."""
    if not condition:
        raise ValueError(f"{op}: shapes {tuple(left.shape)} and {tuple(right.shape)} do not fit")


def check_caches(
    key_cache: torch.Tensor, value_cache: torch.Tensor, scales: KVScales | None, op: str
) -> None:
    """Caches agree, and have scales exactly when they are quantised."""
    require(key_cache.shape == value_cache.shape, op, key_cache, value_cache)
    is_quantised = key_cache.dtype == value_cache.dtype == torch.float8_e4m3fn
    if is_quantised != (scales is not None):
        raise ValueError(f"{op}: caches of {key_cache.dtype} with scales={scales is not None}")
    if scales is not None:
        for table in (scales.key, scales.value):
            require(table.shape == key_cache.shape[:3], op, table, key_cache)


def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scales: KVScales | None,
    window: int | None,
) -> None:
    """Queries fit the caches."""
    check_caches(key_cache, value_cache, scales, "paged attention")
    require(query.shape[2] == key_cache.shape[3], "paged attention", query, key_cache)
    require(query.shape[1] % key_cache.shape[2] == 0, "paged attention", query, key_cache)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def check_store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None,
) -> None:
    """Keys and values fit the caches, and every token has a position."""
    require(key.shape == value.shape, "store_kv", key, value)
    require(key.shape[1:] == key_cache.shape[2:], "store_kv", key, key_cache)
    check_caches(key_cache, value_cache, scales, "store_kv")
    require(slot_mapping.shape == key.shape[:1], "store_kv", slot_mapping, key)


def check_lora(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> None:
    """Inputs fit the slots' weights and the batch."""
    require(x.shape[1] == lora_a.shape[3], "lora", x, lora_a)
    require(ranks.shape == lora_a.shape[:2], "lora", ranks, lora_a)
    require(batch.token_slots.shape == x.shape[:1], "lora", batch.token_slots, x)


def check_outputs(
    num_projections: int,
    lora_b: Sequence[torch.Tensor],
    ys: Sequence[torch.Tensor],
    batch: LoRABatch,
    scales: Sequence[torch.Tensor] | None,
) -> None:
    """Every projection has its weights, an output and, if any has, a table of scales."""
    if not len(lora_b) == len(ys) == num_projections:
        raise ValueError(
            f"{num_projections} projections, {len(lora_b)} lora_b tensors, {len(ys)} outputs"
        )
    for b, y in zip(lora_b, ys, strict=True):
        require(y.shape[1] == b.shape[2], "lora", y, b)
        require(batch.token_slots.shape == y.shape[:1], "lora", batch.token_slots, y)
    for table, b in zip(scales or (), lora_b if scales else (), strict=True):
        fits = table.shape[1:] == (2, b.shape[2]) and table.shape[0] >= b.shape[0]
        require(fits and table.dtype == torch.float32, "lora scales", table, b)
