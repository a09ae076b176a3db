"""Every backend's LoRA ops against the reference in float64."""

import random

import pytest
import torch

from kernels import ops, reference
from kernels.backend import Backend
from tests.kernels.cases import LoRAInputs, assert_close, backends, device_of, lora_inputs

CASES = {
    "one token": lora_inputs([(1, 1)], [[8, 8]]),
    "a decode each": lora_inputs([(2, 1), (0, 1), (3, 1)], [[1, 64, 13, 8]]),
    "base tokens among decodes": lora_inputs(
        [(-1, 1), (2, 1), (-1, 1), (0, 1), (-1, 2)], [[8, 16, 5], [8, 16, 13]]
    ),
    "base model alone": lora_inputs([(-1, 3)], [[8]]),
    "empty segments": lora_inputs([(0, 2), (1, 0), (-1, 0), (1, 3), (0, 0)], [[8, 13]]),
    "no tokens": lora_inputs([], [[8]]),
    "a projection not targeted": lora_inputs([(0, 2), (1, 1)], [[8, 0], [0, 13], [4, 4]]),
    "four projections": lora_inputs([(0, 2), (1, 1)], [[1, 2], [3, 4], [5, 6], [7, 8]]),
    "ragged prefills": lora_inputs(
        [(0, 1), (1, 1), (-1, 3), (2, 37), (0, 17), (1, 1)], [[13, 64, 1], [13, 8, 33]]
    ),
    "prefill of whole tiles": lora_inputs([(1, 32), (0, 64)], [[16, 32]], in_size=64),
    "a wide rank": lora_inputs([(0, 40)], [[512]], in_size=24, out_sizes=[33]),
    "a wide rank beside rank 1": lora_inputs([(0, 1), (1, 1)], [[512, 1]], out_sizes=[33]),
    "odd sizes": lora_inputs([(0, 1), (1, 3)], [[3, 7]], in_size=67, out_sizes=[129]),
    "a long prefill": lora_inputs([(0, 1), (1, 300)], [[4, 20]], in_size=40, out_sizes=[70]),
}


# The C++ extension leaves scales to torch.
WITH_SCALES = [
    parameter
    for parameter in backends("lora_expand", interpreted=torch.float16)
    if parameter.values[0] != "cpu"
]


@pytest.mark.parametrize("inputs", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("lora_shrink"))
def test_shrink_matches_reference(backend: Backend, dtype: torch.dtype, inputs: LoRAInputs) -> None:
    inputs = inputs.to(dtype)
    wide = inputs.to(torch.float64)
    expected = reference.lora_shrink(wide.x, wide.lora_a, wide.ranks, wide.batch)
    there = inputs.to(dtype, device_of(backend))
    actual = ops.lora_shrink(there.x, there.lora_a, there.ranks, there.batch, backend=backend)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    defined = defined_entries(inputs)
    assert_close(actual.cpu()[defined], expected[defined], dtype)


def defined_entries(inputs: LoRAInputs) -> torch.Tensor:
    """Return which entries of the intermediate lie within their adapter's rank."""
    slots = inputs.batch.token_slots.long()
    ranks = inputs.ranks[:, slots.clamp(min=0)] * (slots >= 0)
    return torch.arange(inputs.batch.max_active_rank) < ranks[:, :, None]


@pytest.mark.parametrize("inputs", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("lora_expand"))
def test_expand_matches_reference(backend: Backend, dtype: torch.dtype, inputs: LoRAInputs) -> None:
    inputs = inputs.to(dtype)
    wide = inputs.to(torch.float64)
    mid = torch.randn(len(wide.ys), wide.x.shape[0], wide.batch.max_active_rank)
    mid[~defined_entries(inputs)] = float("nan")
    reference.lora_expand(mid.double(), wide.lora_b, wide.ranks, wide.batch, wide.ys)
    there = inputs.to(dtype, device_of(backend))
    ops.lora_expand(
        mid.to(there.x.device), there.lora_b, there.ranks, there.batch, there.ys, backend=backend
    )
    for actual, expected in zip(there.ys, wide.ys, strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("inputs", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("lora_expand", interpreted=torch.float16))
def test_apply_matches_reference(backend: Backend, dtype: torch.dtype, inputs: LoRAInputs) -> None:
    inputs = inputs.to(dtype)
    wide = inputs.to(torch.float64)
    reference.lora_apply(wide.x, wide.lora_a, wide.lora_b, wide.ranks, wide.batch, wide.ys)
    there = inputs.to(dtype, device_of(backend))
    apply(there, there.ys, backend)
    for actual, expected in zip(there.ys, wide.ys, strict=True):
        assert_close(actual, expected, dtype)


def apply(
    inputs: LoRAInputs,
    ys: list[torch.Tensor],
    backend: Backend,
    scales: list[torch.Tensor] | None = None,
) -> None:
    weights = (inputs.lora_a, inputs.lora_b, inputs.ranks)
    ops.lora_apply(inputs.x, *weights, inputs.batch, ys, scales, backend=backend)


@pytest.mark.parametrize(
    "name", ["base tokens among decodes", "a projection not targeted", "ragged prefills"]
)
@pytest.mark.parametrize(("backend", "dtype"), WITH_SCALES)
def test_outputs_are_scaled_and_shifted_before_they_are_rounded(
    backend: Backend, dtype: torch.dtype, name: str
) -> None:
    inputs = CASES[name].to(dtype)
    torch.manual_seed(0)
    tables = [torch.randn(b.shape[0] + 1, 2, b.shape[2]) for b in inputs.lora_b]
    wide = inputs.to(torch.float64)
    apply(wide, wide.ys, "reference", tables)
    there = inputs.to(dtype, device_of(backend))
    apply(there, there.ys, backend, [table.to(there.x.device) for table in tables])
    base = inputs.batch.token_slots < 0
    for actual, expected, before in zip(there.ys, wide.ys, inputs.ys, strict=True):
        assert_close(actual, expected, dtype)
        assert torch.equal(actual.cpu()[base], before[base])


def test_scales_without_being_asked_for_a_backend_run_on_a_cpu() -> None:
    inputs = CASES["one token"].to(torch.float32)
    tables = [torch.full((b.shape[0], 2, b.shape[2]), 2.0) for b in inputs.lora_b]
    plain = [y.clone() for y in inputs.ys]
    ops.lora_apply(
        inputs.x, inputs.lora_a, inputs.lora_b, inputs.ranks, inputs.batch, plain, backend="torch"
    )
    ops.lora_apply(
        inputs.x, inputs.lora_a, inputs.lora_b, inputs.ranks, inputs.batch, inputs.ys, tables
    )
    for actual, before in zip(inputs.ys, plain, strict=True):
        torch.testing.assert_close(actual, before * 2 + 2)


def generated(seed: int) -> LoRAInputs:
    """Return a batch of random segments, ranks and sizes, none of them round."""
    rng = random.Random(seed)
    num_slots, projections = rng.randint(1, 5), rng.randint(1, 4)
    longest = rng.choice([1, 1, 3, 40])
    segments = [
        (rng.randrange(-1, num_slots), rng.choice([0, 1, 1, rng.randint(1, longest)]))
        for _ in range(rng.randint(1, 7))
    ]
    ranks = [
        [rng.choice([0, 1, rng.randint(2, 33)]) for _ in range(num_slots)]
        for _ in range(projections)
    ]
    widths = [rng.randint(1, 90) for _ in range(projections)]
    # Wide enough in some for the inputs to be cut into parts.
    in_size = rng.choice([rng.randint(1, 80), rng.randint(513, 1100)])
    return lora_inputs(segments, ranks, in_size=in_size, out_sizes=widths)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("backend", "dtype"), backends("lora_expand", interpreted=torch.float16))
def test_generated_batches_match_reference(backend: Backend, dtype: torch.dtype, seed: int) -> None:
    inputs = generated(seed).to(dtype)
    wide = inputs.to(torch.float64)
    apply(wide, wide.ys, "reference")
    there = inputs.to(dtype, device_of(backend))
    apply(there, there.ys, backend)
    for actual, expected in zip(there.ys, wide.ys, strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize(("backend", "dtype"), backends("lora_expand", interpreted=torch.float16))
def test_base_rows_keep_every_bit(backend: Backend, dtype: torch.dtype) -> None:
    inputs = CASES["base tokens among decodes"].to(dtype)
    base = inputs.batch.token_slots < 0
    there = inputs.to(dtype, device_of(backend))
    apply(there, there.ys, backend)
    for actual, before in zip(there.ys, inputs.ys, strict=True):
        assert torch.equal(actual.cpu()[base], before[base])
        assert not torch.equal(actual.cpu()[~base], before[~base])


@pytest.mark.parametrize("segments", [[(0, 1), (1, 1)], [(0, 2), (1, 40)]], ids=["rows", "tiles"])
@pytest.mark.parametrize(("backend", "dtype"), backends("lora_expand", interpreted=torch.float16))
def test_outputs_may_be_views_of_one_tensor(
    backend: Backend, dtype: torch.dtype, segments: list[tuple[int, int]]
) -> None:
    inputs = lora_inputs(segments, [[8, 5], [3, 8]], out_sizes=[40, 24]).to(dtype)
    there = inputs.to(dtype, device_of(backend))
    packed = torch.cat(there.ys, 1)
    apply(there, [packed[:, :40], packed[:, 40:]], backend)
    apply(there, there.ys, backend)
    assert torch.equal(packed, torch.cat(there.ys, 1))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_adapter_update_is_its_low_rank_product(backend: Backend) -> None:
    inputs = lora_inputs([(1, 3)], [[4, 8]]).to(torch.float32)
    weight = inputs.lora_b[0][1, :8].T @ inputs.lora_a[0, 1, :8]
    expected = inputs.ys[0] + inputs.x @ weight.T
    apply(inputs, inputs.ys, backend)
    torch.testing.assert_close(inputs.ys[0], expected, rtol=1e-4, atol=1e-4)
