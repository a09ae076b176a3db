"""The quantised KV cache: its format bit for bit, and what it costs in attention, as stated."""

import dataclasses

import pytest
import torch

from kernels import ops, reference
from kernels.backend import Backend
from kernels.metadata import KVScales
from tests.kernels.cases import (
    INTERPRETED,
    AttentionInputs,
    assert_close,
    attention_inputs,
    device_of,
)

BACKENDS: list[Backend] = ["triton"] if INTERPRETED else ["torch"]
# What docs/performance-gpu.md states: the largest error of an attention output, and its root mean
# square, relative to the root mean square of the outputs.
STATED_LARGEST, STATED_RMS = 0.35, 0.06


def empty_caches(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, KVScales]:
    """Return caches in which nothing is written: what was is seen."""
    codes = torch.full((2, *shape), float("nan")).to(torch.float8_e4m3fn)
    tables = torch.full((2, *shape[:3]), float("nan"))
    return codes[0], codes[1], KVScales(tables[0], tables[1])


def edge_vectors(dtype: torch.dtype) -> torch.Tensor:
    """Return heads whose values land on every code: ties, subnormals, zeros, both signs."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.zeros(24),
        torch.linspace(-448, 448, 24),
        torch.tensor([448.0] + [2.0**-power for power in range(23)]),
        torch.tensor([448.0] + [1.0625 * 2.0 ** -(power % 10) for power in range(23)]),
        torch.tensor([448.0] + [(code + 0.5) * 2.0**-9 for code in range(23)]),
        torch.randn(24, generator=generator) * 1e4,
        torch.randn(24, generator=generator) * 1e-4,
        torch.randn(24, generator=generator),
    ]
    return torch.stack(rows).to(dtype).view(4, 2, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stored_codes_are_torchs_conversion(backend: Backend, dtype: torch.dtype) -> None:
    vectors = edge_vectors(dtype)
    slots = torch.tensor([5, 0, -1, 11])
    expected = empty_caches((3, 4, 2, 24))
    ops.store_kv(vectors, -vectors, *expected[:2], slots, scales=expected[2], backend="reference")
    device = device_of(backend)
    key_cache, value_cache, scales = empty_caches((3, 4, 2, 24))
    there = [t.to(device) for t in (key_cache, value_cache, scales.key, scales.value)]
    ops.store_kv(
        vectors.to(device),
        -vectors.to(device),
        *there[:2],
        slots.to(device),
        scales=KVScales(*there[2:]),
        backend=backend,
    )
    assert torch.equal(there[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(there[1].cpu().view(torch.uint8), expected[1].view(torch.uint8))
    torch.testing.assert_close(there[2].cpu(), expected[2].key, equal_nan=True)
    torch.testing.assert_close(there[3].cpu(), expected[2].value, equal_nan=True)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_values_that_are_no_numbers_stay_so(backend: Backend) -> None:
    vectors = torch.ones(1, 2, 24)
    vectors[0, 1, 3] = float("nan")
    key_cache, value_cache, scales = empty_caches((1, 1, 2, 24))
    ops.store_kv(
        vectors, vectors, key_cache, value_cache, torch.tensor([0]), scales=scales, backend=backend
    )
    assert scales.key[0, 0].isnan().tolist() == [False, True]


def quantised(inputs: AttentionInputs) -> tuple[AttentionInputs, KVScales]:
    """Return the same batch over quantised caches. Vectors differ in size by a hundred times."""
    codes, tables = [], []
    for cache in (inputs.key_cache, inputs.value_cache):
        found, scales = reference.quantise(cache)
        codes.append(found)
        tables.append(scales)
    return dataclasses.replace(inputs, key_cache=codes[0], value_cache=codes[1]), KVScales(*tables)


BATCHES = {
    "decodes": attention_inputs([1, 13, 40, 8]),
    "an empty context": attention_inputs([0, 5]),
    "split decodes": attention_inputs([700, 3], num_heads=2, num_kv_heads=1),
    "head of 80": attention_inputs([9, 3], [(9, 7)], head_size=80, block_size=16),
    "head of 256": attention_inputs([5], [(9, 4)], num_heads=2, num_kv_heads=1, head_size=256),
    "prefills": attention_inputs(prefills=[(5, 5), (70, 33), (9, 1)]),
    "mixed": attention_inputs([3, 12], [(7, 7), (20, 5)]),
}


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        *((inputs, {}) for inputs in BATCHES.values()),
        (BATCHES["mixed"], {"window": 6, "soft_cap": 2.0}),
    ],
    ids=[*BATCHES, "options"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_reads_what_was_quantised(
    backend: Backend, inputs: AttentionInputs, options: dict[str, float]
) -> None:
    dtype = torch.float16 if INTERPRETED else torch.float32
    batch, scales = quantised(inputs.to(dtype))
    expected = ops.paged_attention(
        batch.query.double(),
        batch.key_cache,
        batch.value_cache,
        batch.batch,
        scale=0.2,
        scales=scales,
        backend="reference",
        **options,  # type: ignore[arg-type]
    )
    actual = ops.paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.batch,
        scale=0.2,
        scales=scales,
        backend=backend,
        **options,  # type: ignore[arg-type]
    )
    assert_close(actual, expected, dtype)


@pytest.mark.skipif(INTERPRETED, reason="large enough for statistics")
@pytest.mark.parametrize("spread", [1.0, 100.0], ids=["even", "heads of different sizes"])
def test_error_against_float32_is_as_stated(spread: float) -> None:
    inputs = attention_inputs([400] * 8, num_heads=8, num_kv_heads=2, head_size=128, block_size=16)
    sizes = torch.tensor([1.0, spread])[:, None]
    inputs = dataclasses.replace(
        inputs,
        key_cache=inputs.key_cache * torch.tensor([1.0, 2.0])[:, None],
        value_cache=inputs.value_cache * sizes,
    )
    exact = ops.paged_attention(
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, scale=128**-0.5
    )
    batch, scales = quantised(inputs)
    actual = ops.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.batch, scale=128**-0.5, scales=scales
    )
    # By head: a large one must not hide a small one.
    exact, actual = (x.view(8, 2, -1).transpose(0, 1).flatten(1) for x in (exact, actual))
    error = (actual - exact) / exact.square().mean(1, keepdim=True).sqrt()
    rms, largest = float(error.square().mean(1).sqrt().max()), float(error.abs().max())
    assert rms < STATED_RMS, (rms, largest)
    assert largest < STATED_LARGEST, (rms, largest)
