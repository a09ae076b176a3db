"""Launches that together use every row of the tuning tables, every kernel and every option.

The shapes are an 8B Llama's, and others where they choose another kernel or row. Everything is a
meta tensor: run under ``kernels.aot``.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.kv_store import rope_and_store_kv, store_kv
from kernels.lora_apply import lora_apply
from kernels.metadata import AttentionBatch, KVScales, LoRABatch
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sample_tokens import sample_tokens
from kernels.silu_and_mul import silu_and_mul

HEAD_SIZES = (16, 32, 64, 128, 256)
_BLOCK = 16

_meta = functools.partial(torch.empty, device="meta")
_half = functools.partial(_meta, dtype=torch.bfloat16)


def attention_batch(
    num_decodes: int, prefills: int, query_len: int, context: int
) -> AttentionBatch:
    """Describe decodes, then prefills, that share one context length."""
    num_sequences = num_decodes + prefills
    return AttentionBatch(
        query_starts=_meta(num_sequences + 1, dtype=torch.int32),
        context_lens=_meta(num_sequences, dtype=torch.int32),
        block_tables=_meta(num_sequences, context // _BLOCK, dtype=torch.int32),
        slot_mapping=_meta(num_decodes + prefills * query_len, dtype=torch.int64),
        num_decodes=num_decodes,
        max_query_len=query_len,
        max_context_len=context,
    )


def lora_batch(num_tokens: int, segment_len: int, num_active: int, rank: int) -> LoRABatch:
    """Describe segments of one length."""
    num_segments = num_tokens // segment_len
    return LoRABatch(
        token_slots=_meta(num_tokens, dtype=torch.int32),
        segment_starts=_meta(num_segments + 1, dtype=torch.int32),
        segment_slots=_meta(num_segments, dtype=torch.int32),
        max_segment_len=segment_len,
        max_active_rank=rank,
        num_active=num_active,
    )


def lora(
    num_tokens: int,
    segment_len: int,
    projections: int = 3,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_slots: int = 64,
    rank: int = 64,
    scaled: bool = False,
) -> None:
    """Apply adapters to the attention's projections."""
    batch = lora_batch(num_tokens, segment_len, num_slots, rank)
    in_size, widths = 4096, [4096, 1024, 1024][:projections]
    lora_a = _meta(projections, num_slots, rank, in_size, dtype=dtype)
    lora_b = [_meta(num_slots, rank, width, dtype=dtype) for width in widths]
    ys = [_meta(num_tokens, width, dtype=dtype) for width in widths]
    ranks = _meta(projections, num_slots, dtype=torch.int32)
    tables = [_meta(num_slots + 1, 2, width, dtype=torch.float32) for width in widths]
    x = _meta(num_tokens, in_size, dtype=dtype)
    lora_apply(x, lora_a, lora_b, ranks, batch, ys, tables if scaled else None)


def _cache(
    head_size: int, dtype: torch.dtype, *, fp8: bool
) -> tuple[torch.Tensor, KVScales | None]:
    """Return a tensor that stands for keys and for values, and their scales."""
    shape = (4096, _BLOCK, 8)
    cache = _meta(*shape, head_size, dtype=torch.float8_e4m3fn if fp8 else dtype)
    table = _meta(*shape, dtype=torch.float32)
    return cache, KVScales(table, table) if fp8 else None


def decode(
    head_size: int,
    num_decodes: int = 64,
    *,
    context: int = 4096,
    groups: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    **options: Any,
) -> None:
    """Attend from decodes."""
    cache, scales = _cache(head_size, dtype, fp8=fp8)
    query = _meta(num_decodes, 8 * groups, head_size, dtype=dtype)
    batch = attention_batch(num_decodes, 0, 1, context)
    paged_decode(query, cache, cache, batch, scale=0.1, scales=scales, **options)


def prefill(
    head_size: int,
    query_len: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    **options: Any,
) -> None:
    """Attend from two chunks."""
    cache, scales = _cache(head_size, dtype, fp8=fp8)
    query = _meta(2 * query_len, 32, head_size, dtype=dtype)
    batch = attention_batch(0, 2, query_len, 4096)
    paged_prefill(query, cache, cache, batch, scale=0.1, scales=scales, **options)


def store(head_size: int, *, rope: bool = False, fp8: bool = False) -> None:
    """Write 64 tokens, with or without a rotation."""
    cache, scales = _cache(head_size, torch.bfloat16, fp8=fp8)
    key, slots = _half(64, 8, head_size), _meta(64, dtype=torch.int64)
    if rope:
        angles = _half(64, head_size)
        query = _half(64, 32, head_size)
        rope_and_store_kv(query, key, key, (angles, angles), cache, cache, slots, scales=scales)
    else:
        store_kv(key, key, cache, cache, slots, scales=scales)


def dense(width: int) -> None:
    """Normalise 64 rows, with and without the residual."""
    x, weight = _half(64, width), _half(width)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, _half(64, width), weight, 1e-5)


def sample() -> None:
    """Sample 64 rows of Llama 3's vocabulary."""
    logits, params = _meta(64, 128256), _meta(64, 4)
    sample_tokens(logits, params, _meta(64, dtype=torch.int64))


def all_cases() -> dict[str, Callable[[], object]]:
    """Return every case by name."""
    gate = _half(64, 14336)
    cases: dict[str, Callable[[], object]] = {
        "silu_and_mul": partial(silu_and_mul, gate, gate),
        "sample_tokens": sample,
        "lora_rows_few": partial(lora, 1, 1),
        "lora_rows_many": partial(lora, 256, 1),
        "lora_rows_scaled": partial(lora, 8, 1, scaled=True),
        "lora_tiles_short": partial(lora, 2048, 32),
        "lora_tiles_split": partial(lora, 64, 64, rank=16),
        # Prompts whose inputs are cut into as many parts as there can be, and into fewer.
        "lora_tiles_prompt": partial(lora, 100, 100, rank=16),
        "lora_tiles_prompt_scaled": partial(lora, 100, 100, rank=16, scaled=True),
        "lora_tiles_prompt_float16": partial(lora, 100, 100, rank=16, dtype=torch.float16),
        "lora_tiles_two_prompts": partial(lora, 200, 100, rank=16),
        "lora_tiles_four_prompts": partial(lora, 400, 100, rank=16),
        "lora_tiles_long": partial(lora, 4096, 1024),
        "lora_tiles_scaled": partial(lora, 4096, 1024, scaled=True),
        "lora_tiles_long_float16": partial(lora, 4096, 1024, dtype=torch.float16),
        "lora_tiles_one_projection": partial(lora, 4096, 1024, 1),
        "decode_window_soft_cap": partial(decode, 128, window=1024, soft_cap=30.0),
        "decode_split": partial(decode, 128, 1),
        "decode_multi_head": partial(decode, 128, groups=1),
        "decode_wide_group": partial(decode, 64, groups=32),
        "decode_float32": partial(decode, 128, dtype=torch.float32),
        "prefill_float32": partial(prefill, 128, 512, dtype=torch.float32),
        "prefill_head_96": partial(prefill, 96, 512),
        "store_kv": partial(store, 128),
        "store_kv_rope": partial(store, 128, rope=True),
        "store_kv_fp8": partial(store, 128, fp8=True),
        "store_kv_rope_fp8": partial(store, 128, rope=True, fp8=True),
    }
    for width in (128, 4096, 16384):
        cases[f"rms_norm_{width}"] = partial(dense, width)
    for head_size in HEAD_SIZES:
        cases[f"decode_{head_size}"] = partial(decode, head_size)
        cases[f"prefill_short_{head_size}"] = partial(prefill, head_size, 8)
        cases[f"prefill_long_{head_size}"] = partial(prefill, head_size, 512)
        cases[f"decode_fp8_{head_size}"] = partial(decode, head_size, fp8=True)
        cases[f"prefill_fp8_{head_size}"] = partial(prefill, head_size, 512, fp8=True)
    for head_size in (64, 128, 256):
        cases[f"prefill_window_{head_size}"] = partial(
            prefill, head_size, 512, window=1024, soft_cap=30.0
        )
    return cases
