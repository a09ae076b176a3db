"""Random batches for the op tests, with everything an op must not read set to NaN.

Knows the contracts of ``kernels.ops``. Knows nothing of backends, except which of them a test
process can run.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import pytest
import torch
from _pytest.mark import ParameterSet

from kernels.backend import Backend, is_available
from kernels.metadata import AttentionBatch, LoRABatch

Batch = TypeVar("Batch", AttentionBatch, LoRABatch)

NAN = float("nan")
ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Rounding of the result plus that of sums in float32, relative to values of about one.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def backends(op: str, *, interpreted: torch.dtype = torch.float32) -> list[ParameterSet]:
    """Return a parameter for each backend and dtype that this process can test `op` with.

    Triton needs a GPU, or a process that was started for its interpreter. Such a process tests
    nothing else, in one dtype since it is slow; not bfloat16, whose products it gets wrong.
    """
    triton = is_available("triton", op)
    if INTERPRETED:
        return [_parameter(op, "triton", interpreted)] if triton else []
    cpu: list[Backend] = ["torch", "cpu"]
    choices = [(name, dtype) for name in cpu for dtype in (torch.float32, torch.bfloat16)]
    if ON_GPU and triton:
        choices += [("triton", dtype) for dtype in TOLERANCE]
    return [_parameter(op, *choice) for choice in choices]


def _parameter(op: str, backend: Backend, dtype: torch.dtype) -> ParameterSet:
    missing = not is_available(backend, op)
    marks = [pytest.mark.skip(reason=f"backend {backend} is not built")] if missing else []
    name = f"{backend}-{str(dtype).removeprefix('torch.')}"
    return pytest.param(backend, dtype, marks=marks, id=name)


def device_of(backend: Backend) -> torch.device:
    """Return where `backend` runs in this process."""
    return torch.device("cuda" if backend == "triton" and not INTERPRETED else "cpu")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with float64 `expected`; a NaN anywhere fails."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class AttentionInputs:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: AttentionBatch

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "AttentionInputs":
        """Convert the values' dtype and move everything."""
        return AttentionInputs(
            self.query.to(device, dtype),
            self.key_cache.to(device, dtype),
            self.value_cache.to(device, dtype),
            _move(self.batch, device),
        )


def attention_inputs(
    decodes: Sequence[int] = (),
    prefills: Sequence[tuple[int, int]] = (),
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 4,
) -> AttentionInputs:
    """Build a batch from the decodes' context lengths and the prefills' (context, new tokens).

    Blocks are scattered. Positions past a context are NaN, and so is the block that undefined
    entries of the block tables name.
    """
    generator = torch.Generator().manual_seed(0)
    contexts = [*decodes, *(context for context, _ in prefills)]
    query_lens = [1] * len(decodes) + [num_new for _, num_new in prefills]
    block_counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(block_counts), generator=generator).to(torch.int32)
    unowned = len(order)
    width = max(block_counts, default=0) + 1
    tables = torch.full((len(contexts), width), unowned, dtype=torch.int32)
    caches = torch.full((2, unowned + 1, block_size, num_kv_heads, head_size), NAN)
    for table, blocks, context in zip(tables, order.split(block_counts), contexts, strict=True):
        table[: len(blocks)] = blocks
        filled = torch.full((2, len(blocks) * block_size, num_kv_heads, head_size), NAN)
        filled[:, :context] = torch.randn(filled[:, :context].shape, generator=generator)
        caches[:, blocks.long()] = filled.view(2, len(blocks), *caches.shape[2:])
    num_tokens = sum(query_lens)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.full((num_tokens,), -1),
        num_decodes=len(decodes),
        max_query_len=max(query_lens, default=0),
        max_context_len=max(contexts, default=0),
    )
    query = torch.randn(num_tokens, num_heads, head_size, generator=generator)
    return AttentionInputs(query, caches[0], caches[1], batch)


@dataclass(frozen=True)
class LoRAInputs:
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: list[torch.Tensor]
    ranks: torch.Tensor
    batch: LoRABatch
    ys: list[torch.Tensor]

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "LoRAInputs":
        """Convert the values' dtype and move everything; ys are copies."""
        return LoRAInputs(
            self.x.to(device, dtype),
            self.lora_a.to(device, dtype),
            [b.to(device, dtype) for b in self.lora_b],
            self.ranks.to(device),
            _move(self.batch, device),
            [y.to(device, dtype, copy=True) for y in self.ys],
        )


def lora_inputs(
    segments: Sequence[tuple[int, int]],
    ranks: Sequence[Sequence[int]],
    *,
    in_size: int = 48,
    out_sizes: Sequence[int] | None = None,
) -> LoRAInputs:
    """Build a batch from segments of (slot, tokens) and a rank for each projection and slot.

    Weights of slots that no segment uses, and rows past a slot's rank, are NaN.
    """
    generator = torch.Generator().manual_seed(0)
    rank_table = torch.tensor(ranks, dtype=torch.int32)
    projections, num_slots = rank_table.shape
    widths = out_sizes or [40 + 24 * projection for projection in range(projections)]
    max_rank = int(rank_table.max()) + 3
    active = sorted({slot for slot, num_tokens in segments if slot >= 0 and num_tokens})
    lora_a = torch.full((projections, num_slots, max_rank, in_size), NAN)
    lora_b = [torch.full((num_slots, max_rank, width), NAN) for width in widths]
    for projection in range(projections):
        for slot in active:
            rank = ranks[projection][slot]
            rows = torch.randn(rank, in_size, generator=generator) / in_size**0.5
            lora_a[projection, slot, :rank] = rows
            rows = torch.randn(rank, widths[projection], generator=generator) / max(rank, 1) ** 0.5
            lora_b[projection][slot, :rank] = rows
    lengths = [num_tokens for _, num_tokens in segments]
    slots = torch.tensor([slot for slot, _ in segments], dtype=torch.int32)
    batch = LoRABatch(
        token_slots=slots.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        segment_starts=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32),
        segment_slots=slots,
        max_segment_len=max(lengths, default=0),
        max_active_rank=max((ranks[p][s] for p in range(projections) for s in active), default=0),
        num_active=len(active),
    )
    num_tokens = sum(lengths)
    x = torch.randn(num_tokens, in_size, generator=generator)
    ys = [torch.randn(num_tokens, width, generator=generator) for width in widths]
    return LoRAInputs(x, lora_a, lora_b, rank_table, batch, ys)


def _move(batch: Batch, device: torch.device | None) -> Batch:
    tensors = {
        field.name: getattr(batch, field.name).to(device)
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **tensors)
