# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMSNorm, with the residual's addition before it if asked to: Triton kernel and launchers.

A program holds whole rows: a wide one, or several narrow ones such as the heads of a token.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    update_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    x_stride,
    update_stride,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    x_ptrs = x_ptr + (rows * x_stride)[:, None] + cols[None, :]

    x = tl.load(x_ptrs, mask=mask, other=0.0)
    if ADD:
        update_ptrs = update_ptr + (rows * update_stride)[:, None] + cols[None, :]
        update = tl.load(update_ptrs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(x_ptrs, x, mask=mask)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    # The quotient is rounded before it is multiplied, as Llama does.
    normed = (wide * factor[:, None]).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)

    y_ptrs = y_ptr + (rows * WIDTH)[:, None] + cols[None, :]
    tl.store(y_ptrs, (normed * weight[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch one program for a row, or for several narrow ones."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Do the same with ``stream + update``, which is stored in the stream."""
    return _launch(stream, update, weight, eps)


def _launch(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    added = x if update is None else update
    if x.dim() != 2 or x.stride(1) != 1 or added.stride(1) != 1 or weight.stride(0) != 1:
        raise ValueError("rms_norm: x [T, hidden], the update and the weight need contiguous rows")
    num_rows, width = x.shape
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    if not num_rows:
        return y
    padded, config = tuning.rms_norm(width)
    block_rows = max(1, config.block // padded)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        added,
        weight,
        y,
        num_rows,
        x.stride(0),
        added.stride(0),
        eps,
        WIDTH=width,
        ADD=update is not None,
        BLOCK_ROWS=block_rows,
        BLOCK=padded,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
    return y
