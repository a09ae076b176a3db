# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Writes keys and values into the paged cache, rotating queries and keys on the way if asked to.

A program takes some heads of one token, each as its lower and upper half, since a rotation turns
these into each other. The programs of a token are numbered keys, values, queries.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.fp8 import encode_e4m3, vector_scales
from kernels.metadata import KVScales


@triton.jit
def _rotate(lower, upper, cos_ptr, sin_ptr, lows, highs, low_mask, high_mask):
    """Turn the halves [heads, D / 2] by the token's angles, in float32."""
    cos_low = tl.load(cos_ptr + lows, mask=low_mask, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + lows, mask=low_mask, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + highs, mask=high_mask, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + highs, mask=high_mask, other=0.0).to(tl.float32)[None, :]
    wide_lower, wide_upper = lower.to(tl.float32), upper.to(tl.float32)
    turned_lower = wide_lower * cos_low - wide_upper * sin_low
    turned_upper = wide_upper * cos_high + wide_lower * sin_high
    return turned_lower.to(lower.dtype), turned_upper.to(upper.dtype)


@triton.jit
def _write_heads(
    cache_ptr,
    scales_ptr,
    lower,
    upper,
    position,
    heads,
    lows,
    highs,
    low_mask,
    high_mask,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Store the halves of heads at a flat position, quantised if the cache is."""
    rows = position * HEADS + heads
    head_mask = heads < HEADS
    if FP8:
        lower, upper = lower.to(tl.float32), upper.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(lower), 1), tl.max(tl.abs(upper), 1))
        wrong = tl.max((lower != lower).to(tl.int32), 1) + tl.max((upper != upper).to(tl.int32), 1)
        scales = vector_scales(largest, wrong > 0)
        tl.store(scales_ptr + rows, scales, mask=head_mask)
        lower = encode_e4m3(tl.div_rn(lower, scales[:, None]))
        upper = encode_e4m3(tl.div_rn(upper, scales[:, None]))
    targets = cache_ptr + (rows * HEAD_SIZE)[:, None]
    tl.store(targets + lows[None, :], lower, mask=head_mask[:, None] & low_mask[None, :])
    tl.store(targets + highs[None, :], upper, mask=head_mask[:, None] & high_mask[None, :])


@triton.jit
def _store_kv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slot_mapping_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lows = tl.arange(0, BLOCK_HALF)
    half: tl.constexpr = (HEAD_SIZE + 1) // 2
    highs = half + lows
    low_mask, high_mask = lows < half, highs < HEAD_SIZE
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    if part >= 2 * KV_BLOCKS:
        heads = (part - 2 * KV_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        rows = query_ptr + token * query_token_stride + (heads * query_head_stride)[:, None]
        head_mask = (heads < HEADS)[:, None]
        lower = tl.load(rows + lows[None, :], mask=head_mask & low_mask[None, :], other=0.0)
        upper = tl.load(rows + highs[None, :], mask=head_mask & high_mask[None, :], other=0.0)
        lower, upper = _rotate(lower, upper, cos_ptr, sin_ptr, lows, highs, low_mask, high_mask)
        tl.store(rows + lows[None, :], lower, mask=head_mask & low_mask[None, :])
        tl.store(rows + highs[None, :], upper, mask=head_mask & high_mask[None, :])
        return
    position = tl.load(slot_mapping_ptr + token)
    if position < 0:
        return
    heads = part % KV_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head_mask = (heads < KV_HEADS)[:, None]
    if part < KV_BLOCKS:
        rows = key_ptr + token * key_token_stride + (heads * key_head_stride)[:, None]
        lower = tl.load(rows + lows[None, :], mask=head_mask & low_mask[None, :], other=0.0)
        upper = tl.load(rows + highs[None, :], mask=head_mask & high_mask[None, :], other=0.0)
        if ROPE:
            lower, upper = _rotate(lower, upper, cos_ptr, sin_ptr, lows, highs, low_mask, high_mask)
        _write_heads(
            key_cache_ptr, key_scales_ptr, lower, upper, position, heads,
            lows, highs, low_mask, high_mask, KV_HEADS, HEAD_SIZE, FP8,
        )  # fmt: skip
    else:
        rows = value_ptr + token * value_token_stride + (heads * value_head_stride)[:, None]
        lower = tl.load(rows + lows[None, :], mask=head_mask & low_mask[None, :], other=0.0)
        upper = tl.load(rows + highs[None, :], mask=head_mask & high_mask[None, :], other=0.0)
        _write_heads(
            value_cache_ptr, value_scales_ptr, lower, upper, position, heads,
            lows, highs, low_mask, high_mask, KV_HEADS, HEAD_SIZE, FP8,
        )  # fmt: skip


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """Write each token's key and value at its flat position; -1 writes nothing."""
    _launch(None, key, value, None, key_cache, value_cache, slot_mapping, scales)


def rope_and_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """Rotate queries in place; write rotated keys, and values. Leaves `key` as it is."""
    _launch(query, key, value, rotary, key_cache, value_cache, slot_mapping, scales)


def _launch(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None,
) -> None:
    """Launch one program for some heads of a token.

    The caches are contiguous; the rest may be views of wider tensors, contiguous within a head.
    """
    rotated = key if query is None else query
    cos, sin = rotary or (key[:, 0], key[:, 0])
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("store_kv: the caches must be contiguous")
    if any(x.stride(-1) != 1 for x in (rotated, key, value, cos, sin)):
        raise ValueError("store_kv: queries, keys and values must be contiguous within a head")
    num_tokens, num_heads, head_size = key.shape
    config = tuning.block("store_kv")
    block_half = tuning.next_power_of_two(triton.cdiv(head_size, 2))
    most_heads = tuning.next_power_of_two(max(num_heads, rotated.shape[1]))
    block_heads = max(1, min(config.block // (2 * block_half), most_heads))
    kv_blocks = triton.cdiv(num_heads, block_heads)
    query_blocks = 0 if query is None else triton.cdiv(query.shape[1], block_heads)
    kept = (key_cache, value_cache)
    if scales is not None:
        kept = (key_cache.view(torch.uint8), value_cache.view(torch.uint8))
    _store_kv_kernel[(num_tokens, 2 * kv_blocks + query_blocks)](
        rotated,
        key,
        value,
        cos,
        sin,
        *kept,
        *((scales.key, scales.value) if scales is not None else kept),
        slot_mapping,
        *rotated.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        HEADS=rotated.shape[1],
        KV_HEADS=num_heads,
        HEAD_SIZE=head_size,
        KV_BLOCKS=kv_blocks,
        ROPE=query is not None,
        FP8=scales is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
