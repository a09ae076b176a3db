# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Adds the adapters' low-rank updates to the outputs: Triton kernels and launcher.

One launch serves up to three projections (query, key and value) of different widths: their column
blocks are numbered one after the other. See ``kernels.lora_shrink`` for the two kinds of kernel and
for the parts of the intermediate, which are added up here. An adapter's scale and shift of its
outputs (DoRA, biases) are applied before the only rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.metadata import LoRABatch
from kernels.tiles import find_run, num_tiles

# Projections that one launch takes; more are served by further launches.
_PROJECTIONS_PER_LAUNCH = 3


@triton.jit
def _add_row(
    y_ptr,
    b_ptr,
    scale_ptr,
    mid_ptr,
    rank,
    width,
    block,
    part_stride,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Add one token's update to a stripe of its output row, then scale and shift that."""
    cols = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    col_mask = cols < width
    if not SCALED:
        # A projection that the adapter does not target is neither read nor written.
        col_mask = cols < tl.where(rank > 0, width, 0)

    products = tl.zeros([BLOCK_RANK, BLOCK_OUT], tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        rows = start + tl.arange(0, BLOCK_RANK)
        row_mask = rows < rank
        mid = tl.load(mid_ptr + rows, mask=row_mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            mid += tl.load(mid_ptr + split * part_stride + rows, mask=row_mask, other=0.0)
        weight_ptrs = b_ptr + rows[:, None] * width + cols[None, :]
        weight = tl.load(weight_ptrs, mask=row_mask[:, None] & col_mask[None, :], other=0.0)
        products += weight.to(tl.float32) * mid[:, None]

    y = tl.load(y_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + tl.sum(products, 0)
    if SCALED:
        scale = tl.load(scale_ptr + cols, mask=col_mask, other=1.0)
        y = y * scale + tl.load(scale_ptr + width + cols, mask=col_mask, other=0.0)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=col_mask)


@triton.jit(
    do_not_specialize=["mid_width", "part_stride"],
    do_not_specialize_on_alignment=["token_slots_ptr"],
)
def _expand_rows_kernel(
    mid_ptr,
    ranks_ptr,
    token_slots_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    y0_ptr,
    y1_ptr,
    y2_ptr,
    scale0_ptr,
    scale1_ptr,
    scale2_ptr,
    width0,
    width1,
    width2,
    y0_stride,
    y1_stride,
    y2_stride,
    first_block1,
    first_block2,
    num_slots,
    max_rank,
    mid_width,
    part_stride,
    PROJECTIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(token_slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    ranks_ptr += slot
    mid_ptr += token * mid_width
    mid_stride = SPLITS * part_stride
    row = slot * max_rank
    # One copy of the work for each projection: AMD's compiler rejects a choice among pointers.
    if block < first_block1:
        rank = tl.load(ranks_ptr)
        _add_row(
            y0_ptr + token * y0_stride, b0_ptr + row * width0,
            scale0_ptr + slot * 2 * width0, mid_ptr, rank, width0, block,
            part_stride, SPLITS, SCALED, BLOCK_RANK, BLOCK_OUT,
        )  # fmt: skip
    elif PROJECTIONS > 1:
        if block < first_block2:
            rank = tl.load(ranks_ptr + num_slots)
            _add_row(
                y1_ptr + token * y1_stride, b1_ptr + row * width1,
                scale1_ptr + slot * 2 * width1, mid_ptr + mid_stride, rank, width1,
                block - first_block1, part_stride, SPLITS, SCALED, BLOCK_RANK, BLOCK_OUT,
            )  # fmt: skip
        elif PROJECTIONS > 2:
            rank = tl.load(ranks_ptr + 2 * num_slots)
            _add_row(
                y2_ptr + token * y2_stride, b2_ptr + row * width2,
                scale2_ptr + slot * 2 * width2, mid_ptr + 2 * mid_stride, rank, width2,
                block - first_block2, part_stride, SPLITS, SCALED, BLOCK_RANK, BLOCK_OUT,
            )  # fmt: skip


@triton.jit
def _add_tile(
    y_ptr,
    b_ptr,
    scale_ptr,
    mid_ptr,
    tokens,
    token_mask,
    rank,
    width,
    block,
    y_stride,
    mid_width,
    part_stride,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Add one segment's update to a block of its tokens' output rows, then scale and shift that."""
    cols = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    col_mask = cols < width
    if not SCALED:
        # A projection that the adapter does not target is neither read nor written.
        col_mask = cols < tl.where(rank > 0, width, 0)
    mid_rows = mid_ptr + tokens[:, None] * mid_width
    y_ptrs = y_ptr + tokens[:, None] * y_stride + cols[None, :]

    update = tl.zeros([tokens.shape[0], BLOCK_OUT], tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        rows = start + tl.arange(0, BLOCK_RANK)
        row_mask = rows < rank
        mask = token_mask[:, None] & row_mask[None, :]
        mid = tl.load(mid_rows + rows[None, :], mask=mask, other=0.0)
        if SPLITS > 1:
            # One at a time: all parts in flight at once take more registers and more shared memory
            # than there are.
            for split in tl.range(1, SPLITS, num_stages=1):
                mid_part = mid_rows + split * part_stride + rows[None, :]
                mid += tl.load(mid_part, mask=mask, other=0.0)
        weight_ptrs = b_ptr + rows[:, None] * width + cols[None, :]
        weight = tl.load(weight_ptrs, mask=row_mask[:, None] & col_mask[None, :], other=0.0)
        update = tl.dot(
            mid.to(DOT_DTYPE), weight.to(DOT_DTYPE), update, input_precision=DOT_PRECISION
        )

    mask = token_mask[:, None] & col_mask[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32) + update
    if SCALED:
        scale = tl.load(scale_ptr + cols, mask=col_mask, other=1.0)
        shift = tl.load(scale_ptr + width + cols, mask=col_mask, other=0.0)
        y = y * scale[None, :] + shift[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["mid_width", "part_stride", "num_segments"],
    do_not_specialize_on_alignment=["segment_starts_ptr", "segment_slots_ptr"],
)
def _expand_tiles_kernel(
    mid_ptr,
    ranks_ptr,
    segment_starts_ptr,
    segment_slots_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    y0_ptr,
    y1_ptr,
    y2_ptr,
    scale0_ptr,
    scale1_ptr,
    scale2_ptr,
    width0,
    width1,
    width2,
    y0_stride,
    y1_stride,
    y2_stride,
    first_block1,
    first_block2,
    num_slots,
    max_rank,
    mid_width,
    part_stride,
    num_segments,
    PROJECTIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    SEARCH: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    segment = find_run(segment_starts_ptr, num_segments, 0, tile, BLOCK_TOKENS, SEARCH)
    slot = tl.load(segment_slots_ptr + segment).to(tl.int64)
    if slot < 0:
        return
    segment_start = tl.load(segment_starts_ptr + segment)
    segment_end = tl.load(segment_starts_ptr + segment + 1)
    tile_in_segment = tile - segment - segment_start // BLOCK_TOKENS
    first = segment_start + tile_in_segment * BLOCK_TOKENS
    if first >= segment_end:
        return
    tokens = (first + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    token_mask = tokens < segment_end
    ranks_ptr += slot
    mid_stride = SPLITS * part_stride
    row = slot * max_rank
    if block < first_block1:
        rank = tl.load(ranks_ptr)
        _add_tile(
            y0_ptr, b0_ptr + row * width0, scale0_ptr + slot * 2 * width0, mid_ptr,
            tokens, token_mask, rank, width0, block, y0_stride, mid_width,
            part_stride, SPLITS, SCALED, DOT_DTYPE, DOT_PRECISION, BLOCK_RANK, BLOCK_OUT,
        )  # fmt: skip
    elif PROJECTIONS > 1:
        if block < first_block2:
            rank = tl.load(ranks_ptr + num_slots)
            _add_tile(
                y1_ptr, b1_ptr + row * width1, scale1_ptr + slot * 2 * width1,
                mid_ptr + mid_stride, tokens, token_mask, rank, width1,
                block - first_block1, y1_stride, mid_width, part_stride,
                SPLITS, SCALED, DOT_DTYPE, DOT_PRECISION, BLOCK_RANK, BLOCK_OUT,
            )  # fmt: skip
        elif PROJECTIONS > 2:
            rank = tl.load(ranks_ptr + 2 * num_slots)
            _add_tile(
                y2_ptr, b2_ptr + row * width2, scale2_ptr + slot * 2 * width2,
                mid_ptr + 2 * mid_stride, tokens, token_mask, rank, width2,
                block - first_block2, y2_stride, mid_width, part_stride,
                SPLITS, SCALED, DOT_DTYPE, DOT_PRECISION, BLOCK_RANK, BLOCK_OUT,
            )  # fmt: skip


def lora_expand(
    mid: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """Launch once for all adapters and up to three projections."""
    expand_parts(mid[:, None], lora_b, ranks, batch, ys, scales)


def expand_parts(
    mid: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
) -> None:
    """Do the same with the sums over parts of the inputs: mid [P, splits, T, max_active_rank]."""
    if not all(b.is_contiguous() for b in lora_b) or not ranks.is_contiguous():
        raise ValueError("lora_expand: lora_b and ranks must be contiguous")
    if any(y.stride(1) != 1 for y in ys) or not mid.is_contiguous():
        raise ValueError("lora_expand: mid and the rows of ys must be contiguous")
    if scales is not None and not all(table.is_contiguous() for table in scales):
        raise ValueError("lora_expand: scales must be contiguous")
    for start in range(0, len(ys), _PROJECTIONS_PER_LAUNCH):
        part = slice(start, start + _PROJECTIONS_PER_LAUNCH)
        tables = None if scales is None else scales[part]
        _launch(mid[part], lora_b[part], ranks[part], batch, ys[part], tables)


def _launch(
    mid: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
) -> None:
    num_tokens = mid.shape[2]
    widths = [y.shape[1] for y in ys]
    by_rows = tuning.lora_by_rows(num_tokens, batch.max_segment_len)
    rows = tuning.expand_rows(num_tokens, widths)
    tiles = tuning.expand_tiles(batch.max_segment_len)
    block_out = rows.block_features if by_rows else tiles.block_features
    blocks = [triton.cdiv(width, block_out) for width in widths]
    num_blocks = sum(blocks)
    # Absent projections start past the last block, so no program takes them.
    first_blocks = [blocks[0], sum(blocks[:2])][: len(ys) - 1]
    first_blocks += [num_blocks] * (2 - len(first_blocks))
    absent = _PROJECTIONS_PER_LAUNCH - len(ys)
    outputs = (
        *_pad(lora_b, absent),
        *_pad(ys, absent),
        *_pad(lora_b if scales is None else scales, absent),
        *_pad(widths, absent),
        *_pad([y.stride(0) for y in ys], absent),
        *first_blocks,
    )
    shape = (ranks.shape[1], lora_b[0].shape[1], mid.shape[3], mid.stride(1))
    kind = {"PROJECTIONS": len(ys), "SPLITS": mid.shape[1], "SCALED": scales is not None}
    if by_rows:
        _expand_rows_kernel[(num_tokens, num_blocks)](
            mid,
            ranks,
            batch.token_slots,
            *outputs,
            *shape,
            **kind,
            BLOCK_RANK=rows.block_rank,
            BLOCK_OUT=block_out,
            num_warps=rows.num_warps,
            enable_fp_fusion=True,
        )
        return
    num_segments = batch.segment_slots.shape[0]
    dot_dtype, dot_precision = _dot_mode(lora_b[0].dtype)
    _expand_tiles_kernel[(num_tiles(num_segments, num_tokens, tiles.block_tokens), num_blocks)](
        mid,
        ranks,
        batch.segment_starts,
        batch.segment_slots,
        *outputs,
        *shape,
        num_segments,
        **kind,
        DOT_DTYPE=dot_dtype,
        DOT_PRECISION=dot_precision,
        BLOCK_TOKENS=tiles.block_tokens,
        BLOCK_RANK=tiles.block_rank,
        BLOCK_OUT=block_out,
        SEARCH=tuning.SEARCH,
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
        num_stages=tiles.num_stages,
    )


def _pad(values: Sequence[Any], count: int) -> list[Any]:
    return [*values, *[values[0]] * count]


def _dot_mode(dtype: torch.dtype) -> tuple[Any, str]:
    """Return the dtype and precision of the product with weights of `dtype`.

    The intermediate is float32. It has bfloat16's range, so with bfloat16 weights it is rounded to
    that; float16 could overflow, so there both sides are widened to tf32, which holds float16
    exactly.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, "ieee"
    return tl.float32, "tf32" if dtype == torch.float16 else "ieee"
