# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Causal attention of several new tokens per sequence over a paged context: kernel and launcher.

A tile holds consecutive tokens of one sequence times the query heads that share a key head. The
context before a chunk and the chunk itself are both read from the cache, so a first chunk, a later
chunk and a prompt with a cached prefix are one case.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.flash import load_vectors, score_factors, scores, update, vector_indices
from kernels.metadata import AttentionBatch, KVScales
from kernels.tiles import find_run, num_tiles


@triton.jit
def _attend_range(
    query,
    query_positions,
    m,
    l,  # noqa: E741
    acc,
    start,
    end,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    kv_head,
    factor,
    cap_factor,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_CONTEXT: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """Fold positions start..end into the softmax; unless MASKED every row sees all of them."""
    dims = tl.arange(0, BLOCK_HEAD)
    for first in range(start, end, BLOCK_CONTEXT):
        positions = first + tl.arange(0, BLOCK_CONTEXT)
        in_range = positions < end
        vectors = vector_indices(block_table_ptr, positions, in_range, kv_head, PAGE, KV_HEADS)
        keys, key_scales = load_vectors(
            key_cache_ptr, key_scales_ptr, vectors, in_range, dims, query, HEAD_SIZE, FP8
        )
        factors = factor
        if FP8:
            factors = factor * key_scales[None, :]
        block_scores = scores(query, keys, factors, cap_factor, SOFT_CAP)
        if MASKED:
            visible = positions[None, :] <= query_positions[:, None]
            if WINDOW > 0:
                visible = visible & (positions[None, :] > query_positions[:, None] - WINDOW)
            block_scores = tl.where(visible, block_scores, float("-inf"))
        values, value_scales = load_vectors(
            value_cache_ptr, value_scales_ptr, vectors, in_range, dims, query, HEAD_SIZE, FP8
        )
        m, l, acc = update(block_scores, values, value_scales, m, l, acc, FP8)  # noqa: E741
    return m, l, acc


@triton.jit(
    do_not_specialize=["num_sequences", "first_start", "table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "query_starts_ptr", "context_lens_ptr"],
)
def _prefill_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,
    factor,
    cap_factor,
    num_sequences,
    first_start,
    query_stride,
    query_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CONTEXT: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    SEARCH: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_run(query_starts_ptr, num_sequences, first_start, tile, TILE_TOKENS, SEARCH)
    query_start = tl.load(query_starts_ptr + sequence) - first_start
    query_end = tl.load(query_starts_ptr + sequence + 1) - first_start
    tile_in_sequence = tile - sequence - query_start // TILE_TOKENS
    first_token = query_start + tile_in_sequence * TILE_TOKENS
    if first_token >= query_end:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_HEAD)
    tokens = first_token + rows // GROUPS
    heads = kv_head * GROUPS + rows % GROUPS
    row_mask = (rows < TILE_TOKENS * GROUPS) & (tokens < query_end)
    mask = row_mask[:, None] & (dims < HEAD_SIZE)[None, :]
    query_rows = tokens.to(tl.int64) * query_stride + heads * query_head_stride
    query = tl.load(query_ptr + query_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    # A token sees the positions up to its own; first_position is that of the tile's first token.
    position_offset = context_len - query_end
    first_position = first_token + position_offset
    end = tl.minimum(first_token + TILE_TOKENS, query_end) + position_offset

    m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_ROWS, BLOCK_HEAD], tl.float32)
    block_table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    masked_start = (first_position + 1) // BLOCK_CONTEXT * BLOCK_CONTEXT
    if WINDOW > 0:
        masked_start = tl.maximum(first_position - WINDOW + 1, 0)
    else:
        m, l, acc = _attend_range(  # noqa: E741
            query, tokens + position_offset, m, l, acc, 0, masked_start,
            key_cache_ptr, value_cache_ptr, key_scales_ptr, value_scales_ptr, block_table_ptr,
            kv_head, factor, cap_factor,
            False, KV_HEADS, HEAD_SIZE, PAGE, WINDOW, SOFT_CAP, FP8, BLOCK_CONTEXT, BLOCK_HEAD,
        )  # fmt: skip
    m, l, acc = _attend_range(  # noqa: E741
        query, tokens + position_offset, m, l, acc, masked_start, end,
        key_cache_ptr, value_cache_ptr, key_scales_ptr, value_scales_ptr, block_table_ptr,
        kv_head, factor, cap_factor,
        True, KV_HEADS, HEAD_SIZE, PAGE, WINDOW, SOFT_CAP, FP8, BLOCK_CONTEXT, BLOCK_HEAD,
    )  # fmt: skip

    # Rows past the tile's tokens may have seen nothing; they are not stored.
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_rows = (tokens.to(tl.int64) * (KV_HEADS * GROUPS) + heads) * HEAD_SIZE
    out_ptrs = out_ptr + out_rows[:, None] + dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
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
    """Launch one program per tile and key head; see `kernels.ops`."""
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()) or query.stride(2) != 1:
        raise ValueError("paged_prefill: caches and the heads of query must be contiguous")
    num_tokens, num_heads, head_size = query.shape
    page, kv_heads = key_cache.shape[1:3]
    groups = num_heads // kv_heads
    config = tuning.prefill_config(
        head_size, batch.max_query_len * groups, query.element_size(), fp8=scales is not None
    )
    block_rows = max(config.block_rows, tuning.next_power_of_two(groups))
    tile_tokens = block_rows // groups
    num_sequences = batch.context_lens.shape[0] - batch.num_decodes
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    caches = (key_cache, value_cache)
    if scales is not None:
        caches = (key_cache.view(torch.uint8), value_cache.view(torch.uint8))
    _prefill_kernel[(num_tiles(num_sequences, num_tokens, tile_tokens), kv_heads)](
        query,
        *caches,
        *((scales.key, scales.value) if scales is not None else caches),
        batch.block_tables[batch.num_decodes :],
        batch.query_starts[batch.num_decodes :],
        batch.context_lens[batch.num_decodes :],
        out,
        *score_factors(scale, soft_cap),
        num_sequences,
        batch.num_decodes,
        query.stride(0),
        query.stride(1),
        batch.block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUPS=groups,
        HEAD_SIZE=head_size,
        PAGE=page,
        WINDOW=window or 0,
        SOFT_CAP=soft_cap is not None,
        FP8=scales is not None,
        TILE_TOKENS=tile_tokens,
        BLOCK_ROWS=block_rows,
        BLOCK_CONTEXT=config.block_context,
        BLOCK_HEAD=tuning.pad_head_size(head_size),
        SEARCH=tuning.SEARCH,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
        num_stages=config.num_stages,
    )
    return out
