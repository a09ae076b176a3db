# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Projects tokens onto their adapters' rank spaces: Triton kernels and launcher.

Small batches and decodes of distinct adapters take the row kernel, others the tile kernel. In both,
a token of the base model costs one load, and a program past its adapter's rank stops at once, so
the work done follows each adapter's own rank. Where that leaves most of the device idle, the inputs
are cut into parts with a program each; who reads the intermediate adds the parts up, which needs
neither atomics nor a launch, and always adds in the same order.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.metadata import LoRABatch
from kernels.tiles import find_run, num_tiles


@triton.jit(
    do_not_specialize=["mid_width", "mid_part_stride"],
    do_not_specialize_on_alignment=["token_slots_ptr"],
)
def _shrink_rows_kernel(
    x_ptr,
    lora_a_ptr,
    ranks_ptr,
    token_slots_ptr,
    mid_ptr,
    num_slots,
    max_rank,
    mid_width,
    mid_part_stride,
    x_stride,
    IN_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    projection = (tl.program_id(2) // SPLITS).to(tl.int64)
    first = tl.program_id(2) % SPLITS * PART
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
    for start in range(0, PART, BLOCK_IN):
        cols = first + start + tl.arange(0, BLOCK_IN)
        col_mask = cols < IN_SIZE
        x = tl.load(x_ptr + token * x_stride + cols, mask=col_mask, other=0.0)
        mask = row_mask[:, None] & col_mask[None, :]
        weight = tl.load(weight_ptrs + cols[None, :], mask=mask, other=0.0)
        products += weight.to(tl.float32) * x.to(tl.float32)[None, :]

    part = tl.program_id(2).to(tl.int64)
    mid_ptrs = mid_ptr + part * mid_part_stride + token * mid_width + rows
    tl.store(mid_ptrs, tl.sum(products, 1), mask=row_mask)


@triton.jit(
    do_not_specialize=["num_segments", "mid_width", "mid_part_stride"],
    do_not_specialize_on_alignment=["segment_starts_ptr", "segment_slots_ptr"],
)
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
    mid_part_stride,
    x_stride,
    IN_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SEARCH: tl.constexpr,
):
    tile = tl.program_id(0)
    projection = (tl.program_id(2) // SPLITS).to(tl.int64)
    first_col = tl.program_id(2) % SPLITS * PART
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
    for start in range(0, PART, BLOCK_IN):
        cols = first_col + start + tl.arange(0, BLOCK_IN)
        col_mask = cols < IN_SIZE
        x = tl.load(x_ptrs + cols[None, :], mask=token_mask[:, None] & col_mask[None, :], other=0.0)
        weight = tl.load(
            weight_ptrs + cols[:, None], mask=col_mask[:, None] & row_mask[None, :], other=0.0
        )
        mid = tl.dot(x, weight, mid, input_precision="ieee")

    part = tl.program_id(2).to(tl.int64)
    mid_ptrs = mid_ptr + part * mid_part_stride + tokens[:, None] * mid_width
    tl.store(mid_ptrs + rows[None, :], mid, mask=token_mask[:, None] & row_mask[None, :])


def lora_shrink(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    """Return the sum of `shrink_parts`; undefined where no adapter's rank reaches."""
    parts = shrink_parts(x, lora_a, ranks, batch)
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)


def shrink_parts(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    """Launch once for all projections and adapters: the sums over each part of the inputs.

    returns  [P, splits, T, max_active_rank] float32
    """
    if not lora_a.is_contiguous() or not ranks.is_contiguous() or x.stride(1) != 1:
        raise ValueError("lora_shrink: lora_a, ranks and the rows of x must be contiguous")
    if tuning.lora_by_rows(x.shape[0], batch.max_segment_len):
        return _launch_rows(x, lora_a, ranks, batch)
    return _launch_tiles(x, lora_a, ranks, batch)


def _launch_rows(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    projections, _, _, in_size = lora_a.shape
    num_tokens, width = x.shape[0], batch.max_active_rank
    config = tuning.shrink_rows(num_tokens * projections * width)
    rank_blocks = triton.cdiv(width, config.block_rank)
    splits = tuning.shrink_splits(num_tokens * rank_blocks * projections, in_size, x.device)
    block_in, part = _part(in_size, splits, config.block_features)
    mid, sizes = _intermediate(x, lora_a, batch, splits)
    _shrink_rows_kernel[(num_tokens, rank_blocks, projections * splits)](
        x,
        lora_a,
        ranks,
        batch.token_slots,
        mid,
        *sizes,
        IN_SIZE=in_size,
        SPLITS=splits,
        PART=part,
        BLOCK_RANK=config.block_rank,
        BLOCK_IN=block_in,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
    return mid


def _launch_tiles(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    projections, _, _, in_size = lora_a.shape
    config = tuning.shrink_tiles(batch.max_segment_len)
    num_segments = batch.segment_slots.shape[0]
    tiles = num_tiles(num_segments, x.shape[0], config.block_tokens)
    rank_blocks = triton.cdiv(batch.max_active_rank, config.block_rank)
    splits = tuning.shrink_splits(tiles * rank_blocks * projections, in_size, x.device)
    block_in, part = _part(in_size, splits, config.block_features)
    mid, sizes = _intermediate(x, lora_a, batch, splits)
    _shrink_tiles_kernel[(tiles, rank_blocks, projections * splits)](
        x,
        lora_a,
        ranks,
        batch.segment_starts,
        batch.segment_slots,
        mid,
        num_segments,
        *sizes,
        IN_SIZE=in_size,
        SPLITS=splits,
        PART=part,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_RANK=config.block_rank,
        BLOCK_IN=block_in,
        SEARCH=tuning.SEARCH,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
        num_stages=config.num_stages,
    )
    return mid


def _part(in_size: int, splits: int, block_features: int) -> tuple[int, int]:
    """Return the features of a block and of a part: whole blocks that together cover the inputs."""
    part = triton.cdiv(in_size, splits)
    block = max(16, min(block_features, tuning.next_power_of_two(part)))
    return block, triton.cdiv(part, block) * block


def _intermediate(
    x: torch.Tensor, lora_a: torch.Tensor, batch: LoRABatch, splits: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the intermediate and what both kernels take of sizes and strides."""
    shape = (lora_a.shape[0], splits, x.shape[0], batch.max_active_rank)
    mid = torch.empty(shape, dtype=torch.float32, device=x.device)
    return mid, (*lora_a.shape[1:3], shape[3], mid.stride(1), x.stride(0))
