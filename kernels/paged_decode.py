# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of one new token per sequence over its paged context: Triton kernels and launcher.

A program takes all query heads that share a key head, so that the context is read once. When the
batch is too small to fill the device, each context is split; a second kernel merges the parts.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.flash import load_vectors, score_factors, scores, update, vector_indices
from kernels.metadata import AttentionBatch, KVScales


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "context_lens_ptr"],
)
def _decode_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    log_sum_ptr,
    factor,
    cap_factor,
    query_stride,
    query_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CONTEXT: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + sequence)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(context_len - WINDOW, 0)
    end = context_len
    if SPLITS > 1:
        split_len = tl.cdiv(tl.cdiv(context_len - start, SPLITS), BLOCK_CONTEXT) * BLOCK_CONTEXT
        start += split * split_len
        end = tl.minimum(start + split_len, context_len)

    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_HEAD)
    row_mask = (rows < GROUPS)[:, None] & (dims < HEAD_SIZE)[None, :]
    heads = kv_head * GROUPS + rows
    query_ptrs = query_ptr + sequence * query_stride + heads[:, None] * query_head_stride
    query = tl.load(query_ptrs + dims[None, :], mask=row_mask, other=0.0)

    m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_ROWS, BLOCK_HEAD], tl.float32)
    block_table_ptr = block_tables_ptr + sequence * table_stride
    for first in range(start, end, BLOCK_CONTEXT):
        positions = first + tl.arange(0, BLOCK_CONTEXT)
        visible = positions < end
        vectors = vector_indices(block_table_ptr, positions, visible, kv_head, PAGE, KV_HEADS)
        keys, key_scales = load_vectors(
            key_cache_ptr, key_scales_ptr, vectors, visible, dims, query, HEAD_SIZE, FP8
        )
        factors = factor
        if FP8:
            factors = factor * key_scales[None, :]
        block_scores = scores(query, keys, factors, cap_factor, SOFT_CAP)
        block_scores = tl.where(visible[None, :], block_scores, float("-inf"))
        values, value_scales = load_vectors(
            value_cache_ptr, value_scales_ptr, vectors, visible, dims, query, HEAD_SIZE, FP8
        )
        m, l, acc = update(block_scores, values, value_scales, m, l, acc, FP8)  # noqa: E741

    # An empty context or part has l = 0 and gives zeros.
    total = tl.where(l == 0.0, 1.0, l)
    parts = ((sequence * KV_HEADS * GROUPS) + heads) * SPLITS + split
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + parts[:, None] * HEAD_SIZE + dims[None, :], out, mask=row_mask)
    if SPLITS > 1:
        tl.store(log_sum_ptr + parts, m + tl.log2(total), mask=rows < GROUPS)


@triton.jit
def _merge_kernel(
    parts_ptr,
    log_sum_ptr,
    out_ptr,
    HEAD_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_HEAD)
    dim_mask = dims < HEAD_SIZE
    log_sums = tl.load(log_sum_ptr + row * SPLITS + splits)
    offsets = (row * SPLITS + splits)[:, None] * HEAD_SIZE + dims[None, :]
    parts = tl.load(parts_ptr + offsets, mask=dim_mask[None, :], other=0.0)

    largest = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)

    tl.store(out_ptr + row * HEAD_SIZE + dims, out.to(out_ptr.dtype.element_ty), mask=dim_mask)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Launch one program per decode, key head and part of the context; see `kernels.ops`."""
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()) or query.stride(2) != 1:
        raise ValueError("paged_decode: caches and the heads of query must be contiguous")
    num_decodes, num_heads, head_size = query.shape
    page, kv_heads = key_cache.shape[1:3]
    config = tuning.decode_config(head_size, query.element_size(), fp8=scales is not None)
    splits = tuning.decode_splits(
        num_decodes * kv_heads,
        min(batch.max_context_len, window or batch.max_context_len),
        query.device,
    )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts, log_sums = out, out
    if splits > 1:
        parts = out.new_empty(num_decodes, num_heads, splits, head_size, dtype=torch.float32)
        log_sums = out.new_empty(num_decodes, num_heads, splits, dtype=torch.float32)
    caches = (key_cache, value_cache)
    if scales is not None:
        caches = (key_cache.view(torch.uint8), value_cache.view(torch.uint8))
    _decode_kernel[(num_decodes, kv_heads, splits)](
        query,
        *caches,
        *((scales.key, scales.value) if scales is not None else caches),
        batch.block_tables,
        batch.context_lens,
        parts,
        log_sums,
        *score_factors(scale, soft_cap),
        query.stride(0),
        query.stride(1),
        batch.block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUPS=num_heads // kv_heads,
        HEAD_SIZE=head_size,
        PAGE=page,
        WINDOW=window or 0,
        SOFT_CAP=soft_cap is not None,
        SPLITS=splits,
        FP8=scales is not None,
        BLOCK_ROWS=max(config.block_rows, tuning.next_power_of_two(num_heads // kv_heads)),
        BLOCK_CONTEXT=config.block_context,
        BLOCK_HEAD=tuning.pad_head_size(head_size),
        num_warps=config.num_warps,
        enable_fp_fusion=True,
        num_stages=config.num_stages,
    )
    if splits > 1:
        _merge_kernel[(num_decodes * num_heads,)](
            parts,
            log_sums,
            out,
            HEAD_SIZE=head_size,
            SPLITS=splits,
            BLOCK_HEAD=tuning.pad_head_size(head_size),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
