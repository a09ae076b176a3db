"""Every backend's paged attention against the reference in float64."""

import random
from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.backend import Backend
from tests.kernels.cases import (
    AttentionInputs,
    assert_close,
    attention_inputs,
    backends,
    device_of,
)

Options = dict[str, Any]

DECODES = {
    "one token": attention_inputs([1]),
    "ragged": attention_inputs([1, 13, 4, 8, 30]),
    "an empty context": attention_inputs([0, 5]),
    "multi-head": attention_inputs([9, 3], num_heads=3, num_kv_heads=3),
    "three heads a group": attention_inputs([9, 3], num_heads=9, num_kv_heads=3),
    "multi-query": attention_inputs([9, 3], num_heads=17, num_kv_heads=1),
    "head of 80": attention_inputs([9, 3], head_size=80, block_size=16),
    "head of 256": attention_inputs([5], num_heads=2, num_kv_heads=1, head_size=256),
    "long enough to be split": attention_inputs([700, 3, 129], num_heads=2, num_kv_heads=1),
}
PREFILLS = {
    "one token": attention_inputs(prefills=[(1, 1)]),
    "whole prompts": attention_inputs(prefills=[(5, 5), (17, 17), (1, 1)]),
    "chunks after a prefix": attention_inputs(prefills=[(20, 3), (70, 33), (9, 1)]),
    "no new tokens in one": attention_inputs(prefills=[(6, 6), (4, 0), (8, 2)]),
    "several tiles": attention_inputs(prefills=[(90, 75), (66, 66)], num_heads=6, num_kv_heads=2),
    "multi-query": attention_inputs(prefills=[(9, 7)], num_heads=71, num_kv_heads=1, head_size=16),
    "head of 96": attention_inputs(prefills=[(9, 7), (3, 3)], head_size=96, block_size=16),
    "head of 256": attention_inputs(prefills=[(40, 4)], num_heads=2, num_kv_heads=1, head_size=256),
}
OPTIONS: dict[str, Options] = {
    "plain": {},
    "window": {"window": 6},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 2.0},
    "window and soft cap": {"window": 11, "soft_cap": 1.0},
}


def check(
    op: str, inputs: AttentionInputs, backend: Backend, dtype: torch.dtype, options: Options
) -> None:
    scale = inputs.query.shape[2] ** -0.5
    inputs = inputs.to(dtype)
    wide = inputs.to(torch.float64)
    expected = getattr(ops, op)(
        wide.query,
        wide.key_cache,
        wide.value_cache,
        wide.batch,
        scale=scale,
        backend="reference",
        **options,
    )
    there = inputs.to(dtype, device_of(backend))
    actual = getattr(ops, op)(
        there.query,
        there.key_cache,
        there.value_cache,
        there.batch,
        scale=scale,
        backend=backend,
        **options,
    )
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("inputs", DECODES.values(), ids=DECODES.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("paged_decode"))
def test_decode_matches_reference(
    backend: Backend, dtype: torch.dtype, inputs: AttentionInputs
) -> None:
    check("paged_decode", inputs, backend, dtype, {})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("paged_decode", interpreted=torch.float16))
def test_decode_options_match_reference(
    backend: Backend, dtype: torch.dtype, options: Options
) -> None:
    check("paged_decode", attention_inputs([1, 13, 40]), backend, dtype, options)


@pytest.mark.parametrize(("backend", "dtype"), backends("paged_decode"))
def test_split_decode_with_a_window_matches_reference(backend: Backend, dtype: torch.dtype) -> None:
    inputs = attention_inputs([600, 2, 0], num_heads=2, num_kv_heads=1)
    check("paged_decode", inputs, backend, dtype, {"window": 300})


@pytest.mark.parametrize("inputs", PREFILLS.values(), ids=PREFILLS.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("paged_prefill"))
def test_prefill_matches_reference(
    backend: Backend, dtype: torch.dtype, inputs: AttentionInputs
) -> None:
    check("paged_prefill", inputs, backend, dtype, {})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("paged_prefill", interpreted=torch.float16))
def test_prefill_options_match_reference(
    backend: Backend, dtype: torch.dtype, options: Options
) -> None:
    inputs = attention_inputs(prefills=[(5, 5), (100, 40)])
    check("paged_prefill", inputs, backend, dtype, options)


@pytest.mark.parametrize(
    "inputs",
    [
        attention_inputs([3, 12], [(7, 7), (20, 5)]),
        attention_inputs([3, 12]),
        attention_inputs([], [(7, 7)]),
        attention_inputs(),
    ],
    ids=["mixed", "decodes", "prefills", "empty"],
)
@pytest.mark.parametrize(("backend", "dtype"), backends("paged_decode", interpreted=torch.float16))
def test_mixed_batch_matches_its_two_halves(
    backend: Backend, dtype: torch.dtype, inputs: AttentionInputs
) -> None:
    inputs = inputs.to(dtype)
    wide = inputs.to(torch.float64)
    split = inputs.batch.num_decodes
    halves = [
        op(rows, wide.key_cache, wide.value_cache, wide.batch, scale=0.2)
        for op, rows in (
            (reference.paged_decode, wide.query[:split]),
            (reference.paged_prefill, wide.query[split:]),
        )
    ]
    there = inputs.to(dtype, device_of(backend))
    actual = ops.paged_attention(
        there.query, there.key_cache, there.value_cache, there.batch, scale=0.2, backend=backend
    )
    assert_close(actual, torch.cat(halves), dtype)


@pytest.mark.parametrize(("backend", "dtype"), backends("paged_decode", interpreted=torch.float16))
def test_query_may_be_a_view_of_a_wider_tensor(backend: Backend, dtype: torch.dtype) -> None:
    inputs = attention_inputs([3, 12], [(7, 7), (20, 5)]).to(dtype)
    packed = torch.cat([inputs.query, inputs.query.new_full((14, 2, 32), float("nan"))], 1)
    view = AttentionInputs(packed[:, :4], inputs.key_cache, inputs.value_cache, inputs.batch)
    wide = inputs.to(torch.float64)
    expected = ops.paged_attention(
        wide.query, wide.key_cache, wide.value_cache, wide.batch, scale=0.2, backend="reference"
    )
    there = view.to(dtype, device_of(backend))
    actual = ops.paged_attention(
        there.query, there.key_cache, there.value_cache, there.batch, scale=0.2, backend=backend
    )
    assert_close(actual, expected, dtype)


def generated(seed: int) -> tuple[AttentionInputs, Options]:
    """Return a mixed batch of random lengths and sizes, none of them round, and options."""
    rng = random.Random(seed)
    num_kv_heads = rng.randint(1, 3)
    inputs = attention_inputs(
        [rng.choice([0, 1, rng.randint(2, 70)]) for _ in range(rng.randint(0, 4))],
        [
            (context, rng.randint(0, context))
            for context in (rng.randint(1, 60) for _ in range(rng.randint(0, 3)))
        ],
        num_heads=num_kv_heads * rng.choice([1, 2, 5]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([16, 40, 112, 160]),
        block_size=rng.choice([1, 4, 16]),
    )
    window = rng.choice([None, 1, rng.randint(2, 40)])
    return inputs, {"window": window, "soft_cap": rng.choice([None, 3.0])}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("backend", "dtype"), backends("paged_decode", interpreted=torch.float16))
def test_generated_batches_match_reference(backend: Backend, dtype: torch.dtype, seed: int) -> None:
    inputs, options = generated(seed)
    check("paged_attention", inputs, backend, dtype, options)


def test_reference_agrees_with_torch_attention() -> None:
    inputs = attention_inputs(prefills=[(11, 4)], block_size=16).to(torch.float64)
    block = inputs.batch.block_tables[0, 0]
    keys, values = (
        cache[block, :11].transpose(0, 1).repeat_interleave(2, 0)
        for cache in (inputs.key_cache, inputs.value_cache)
    )
    mask = torch.arange(11) <= torch.arange(7, 11)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        inputs.query.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3
    )
    actual = reference.paged_prefill(
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, scale=0.3
    )
    torch.testing.assert_close(actual, expected.transpose(0, 1))
