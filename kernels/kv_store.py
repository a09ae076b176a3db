# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Writes keys and values into the paged cache: Triton kernel and launcher."""

import torch
import triton
import triton.language as tl

from kernels.tuning import STORE_KV


@triton.jit
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_ELEMENTS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(slot_mapping_ptr + token)
    if position < 0:
        return
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < NUM_ELEMENTS
    heads, dims = elements // HEAD_SIZE, elements % HEAD_SIZE
    target = position * NUM_ELEMENTS + elements

    source = key_ptr + token * key_token_stride + heads * key_head_stride + dims
    tl.store(key_cache_ptr + target, tl.load(source, mask=mask), mask=mask)
    source = value_ptr + token * value_token_stride + heads * value_head_stride + dims
    tl.store(value_cache_ptr + target, tl.load(source, mask=mask), mask=mask)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value at its flat position; -1 writes nothing.

    The caches are contiguous; keys and values may be views of a wider tensor, contiguous within a
    head.
    """
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("store_kv: the caches must be contiguous")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("store_kv: keys and values must be contiguous within a head")
    num_tokens, num_heads, head_size = key.shape
    grid = (num_tokens, triton.cdiv(num_heads * head_size, STORE_KV.block))
    _store_kv_kernel[grid](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_ELEMENTS=num_heads * head_size,
        HEAD_SIZE=head_size,
        BLOCK=STORE_KV.block,
        num_warps=STORE_KV.num_warps,
        enable_fp_fusion=True,
    )
