# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The gate of a Llama MLP, silu(gate) * up: Triton kernel and launcher."""

import torch
import triton
import triton.language as tl

from kernels import tuning


@triton.jit
def _silu_and_mul_kernel(
    gate_ptr, up_ptr, y_ptr, width, gate_stride, up_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width

    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up

    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Launch one program for a stripe of a row; the result is rounded once."""
    if gate.dim() != 2 or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError("silu_and_mul: gate and up [T, n] need contiguous rows")
    num_rows, width = gate.shape
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not num_rows:
        return y
    config = tuning.block("silu_and_mul")
    block = min(config.block, tuning.next_power_of_two(width))
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate,
        up,
        y,
        width,
        gate.stride(0),
        up.stride(0),
        BLOCK=block,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
    return y
