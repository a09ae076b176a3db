# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Projects tokens onto their adapters' rank spaces: Triton kernels and launcher.

Small batches and decodes of distinct adapters take the row kernel, others the tile kernel. In both,
a token of the base model costs one load, and a program past its adapter's rank stops at once, so
the work done follows each adapter's own rank.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.metadata import LoRABatch
from kernels.tiles import find_run, num_tiles


@triton.jit
def _shrink_rows_kernel(
    x_ptr,
    lora_a_ptr,
    ranks_ptr,
    token_slots_ptr,
    mid_ptr,
    num_slots,
    max_rank,
    mid_width,
    mid_projection_stride,
    x_stride,
    IN_SIZE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    projection = tl.program_id(2).to(tl.int64)
    slot = tl.load(token_slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + projection * num_slots + slot)
    if tl.program_id(1) * BLOCK_RANK >= rank:
        return
    rows = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    row_mask = rows < rank
    weight_rows = (projection * num_slots + slot) * max_rank + rows
    weight_ptrs = lora_a_ptr + weight_rows[:, None] * IN_SIZE

    products = tl.zeros([BLOCK_RANK, BLOCK_IN], tl.float32)
    for start in range(0, IN_SIZE, BLOCK_IN):
        cols = start + tl.arange(0, BLOCK_IN)
        col_mask = cols < IN_SIZE
        x = tl.load(x_ptr + token * x_stride + cols, mask=col_mask, other=0.0)
        mask = row_mask[:, None] & col_mask[None, :]
        weight = tl.load(weight_ptrs + cols[None, :], mask=mask, other=0.0)
        products += weight.to(tl.float32) * x.to(tl.float32)[None, :]

    mid_ptrs = mid_ptr + projection * mid_projection_stride + token * mid_width + rows
    tl.store(mid_ptrs, tl.sum(products, 1), mask=row_mask)


@triton.jit
def _shrink_tiles_kernel(
    x_ptr,
    lora_a_ptr,
    ranks_ptr,
    segment_starts_ptr,
    segment_slots_ptr,
    mid_ptr,
    num_segments,
    num_slots,
    max_rank,
    mid_width,
    mid_projection_stride,
    x_stride,
    IN_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SEARCH: tl.constexpr,
):
    tile = tl.program_id(0)
    projection = tl.program_id(2).to(tl.int64)
    segment = find_run(segment_starts_ptr, num_segments, 0, tile, BLOCK_TOKENS, SEARCH)
    slot = tl.load(segment_slots_ptr + segment).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + projection * num_slots + slot)
    if tl.program_id(1) * BLOCK_RANK >= rank:
        return
    segment_start = tl.load(segment_starts_ptr + segment)
    segment_end = tl.load(segment_starts_ptr + segment + 1)
    tile_in_segment = tile - segment - segment_start // BLOCK_TOKENS
    first = segment_start + tile_in_segment * BLOCK_TOKENS
    if first >= segment_end:
        return
    tokens = (first + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    token_mask = tokens < segment_end
    rows = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    row_mask = rows < rank
    weight_rows = (projection * num_slots + slot) * max_rank + rows
    x_ptrs = x_ptr + tokens[:, None] * x_stride
    weight_ptrs = lora_a_ptr + weight_rows[None, :] * IN_SIZE

    mid = tl.zeros([BLOCK_TOKENS, BLOCK_RANK], tl.float32)
    for start in range(0, IN_SIZE, BLOCK_IN):
        cols = start + tl.arange(0, BLOCK_IN)
        col_mask = cols < IN_SIZE
        x = tl.load(x_ptrs + cols[None, :], mask=token_mask[:, None] & col_mask[None, :], other=0.0)
        weight = tl.load(
            weight_ptrs + cols[:, None], mask=col_mask[:, None] & row_mask[None, :], other=0.0
        )
        mid = tl.dot(x, weight, mid, input_precision="ieee")

    mid_ptrs = mid_ptr + projection * mid_projection_stride + tokens[:, None] * mid_width
    tl.store(mid_ptrs + rows[None, :], mid, mask=token_mask[:, None] & row_mask[None, :])


def lora_shrink(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    """Launch once for all projections and adapters; undefined where no adapter's rank reaches."""
    if not lora_a.is_contiguous() or not ranks.is_contiguous() or x.stride(1) != 1:
        raise ValueError("lora_shrink: lora_a, ranks and the rows of x must be contiguous")
    projections, num_slots, max_rank, in_size = lora_a.shape
    num_tokens, width = x.shape[0], batch.max_active_rank
    mid = torch.empty(projections, num_tokens, width, dtype=torch.float32, device=x.device)
    shape = (num_slots, max_rank, width, mid.stride(0), x.stride(0))
    if tuning.lora_by_rows(num_tokens, batch.max_segment_len):
        rows = tuning.shrink_rows(num_tokens * projections * width)
        _shrink_rows_kernel[(num_tokens, triton.cdiv(width, rows.block_rank), projections)](
            x,
            lora_a,
            ranks,
            batch.token_slots,
            mid,
            *shape,
            IN_SIZE=in_size,
            BLOCK_RANK=rows.block_rank,
            BLOCK_IN=min(rows.block_features, tuning.next_power_of_two(in_size)),
            num_warps=rows.num_warps,
            enable_fp_fusion=True,
        )
        return mid
    config = tuning.shrink_tiles(batch.max_segment_len)
    num_segments = batch.segment_slots.shape[0]
    tiles = num_tiles(num_segments, num_tokens, config.block_tokens)
    _shrink_tiles_kernel[(tiles, triton.cdiv(width, config.block_rank), projections)](
        x,
        lora_a,
        ranks,
        batch.segment_starts,
        batch.segment_slots,
        mid,
        num_segments,
        *shape,
        IN_SIZE=in_size,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_RANK=config.block_rank,
        BLOCK_IN=config.block_features,
        SEARCH=tuning.SEARCH,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
        num_stages=config.num_stages,
    )
    return mid
