"""The C++ ops against the reference in float64, for every instruction set this CPU runs.

`test_dense` and its siblings hold what all backends share; here are the sizes and layouts at
which the C++ takes another path: widths that no vector divides, many rows, tiles of tokens, long
contexts.
"""

from collections.abc import Iterator

import pytest
import torch

from kernels import cpu, ops
from tests.kernels.cases import LoRAInputs, assert_close, attention_inputs, lora_inputs

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="the C++ ops are not built (python -m kernels.build)"
)

ISAS = cpu.supported_isas() if cpu.available() else ["none"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test once for every instruction set."""
    with cpu.use_isa(request.param):
        yield


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("in_size", [8, 100, 576, 577])
@pytest.mark.parametrize("out_size", [1, 67, 192])
def test_linear_matches_reference(dtype: torch.dtype, in_size: int, out_size: int) -> None:
    x = normal(97, in_size, dtype=dtype)
    weight, bias = normal(out_size, in_size, dtype=dtype) / 16, normal(out_size, dtype=dtype)
    expected = ops.linear(x.double(), weight.double(), bias.double(), backend="reference")
    for rows in (1, 2, 3, 6, 7, 19, 33, 97):
        assert_close(cpu.linear(x[:rows], weight, bias), expected[:rows], dtype)


def test_linear_of_a_row_is_the_same_in_every_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_tiles_min_rows", None)
    x, weight = normal(140, 577, dtype=dtype), normal(67, 577, dtype=dtype)
    alone = torch.cat([cpu.linear(row, weight) for row in x[:, None]])
    for rows in (2, 5, 7, 13, 40, 140):
        assert torch.equal(cpu.linear(x[-rows:], weight), alone[-rows:])


def test_linear_reads_rows_by_stride(dtype: torch.dtype) -> None:
    x, weight = normal(5, 90, dtype=dtype), normal(12, 80, dtype=dtype)
    sliced, transposed = x[:, 3:67], normal(64, 5, dtype=dtype).T
    assert torch.equal(
        cpu.linear(sliced, weight[:, :64]), cpu.linear(sliced.contiguous(), weight[:, :64].clone())
    )
    assert torch.equal(
        cpu.linear(transposed, weight[:, :64]), cpu.linear(transposed.contiguous(), weight[:, :64])
    )


def test_linear_multi_equals_one_call_each(dtype: torch.dtype) -> None:
    x = normal(9, 100, dtype=dtype)
    weights = [normal(size, 100, dtype=dtype, seed=size) for size in (300, 1, 65)]
    biases = [None, normal(1, dtype=dtype), None]
    for y, weight, bias in zip(cpu.linear_multi(x, weights, biases), weights, biases, strict=True):
        assert torch.equal(y, cpu.linear(x, weight, bias))


def test_linear_of_nothing_is_empty(dtype: torch.dtype) -> None:
    weight = normal(4, 8, dtype=dtype)
    assert cpu.linear(normal(0, 8, dtype=dtype), weight).shape == (0, 4)
    assert cpu.linear(normal(3, 8, dtype=dtype), weight[:0]).shape == (3, 0)


def test_linear_keeps_infinities_and_nans_in_their_rows(dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 35, dtype=dtype), torch.ones(5, 35, dtype=dtype)
    x[0, 34], x[2, 0] = float("inf"), float("nan")
    y = cpu.linear(x, weight)
    assert torch.isposinf(y[0]).all()
    assert (y[1] == 35).all()
    assert torch.isnan(y[2]).all()


def check_lora(inputs: LoRAInputs, dtype: torch.dtype) -> None:
    """Compare into ys that are slices of wider tensors, and check that nothing else was written."""
    narrow = inputs.to(dtype)
    wide = narrow.to(torch.float64)
    frames = [torch.full((y.shape[0], y.shape[1] + 7), 5.0).to(dtype) for y in narrow.ys]
    ys = [frame[:, 3:-4] for frame in frames]
    for y, start in zip(ys, narrow.ys, strict=True):
        y.copy_(start)
    cpu.lora_apply(narrow.x, narrow.lora_a, narrow.lora_b, narrow.ranks, narrow.batch, ys)
    ops.lora_apply(
        wide.x, wide.lora_a, wide.lora_b, wide.ranks, wide.batch, wide.ys, backend="reference"
    )
    for frame, y, expected in zip(frames, ys, wide.ys, strict=True):
        assert_close(y, expected, dtype)
        assert (frame[:, :3] == 5).all()
        assert (frame[:, -4:] == 5).all()
    untouched = narrow.batch.token_slots < 0
    for y, start in zip(ys, narrow.ys, strict=True):
        assert torch.equal(y[untouched], start[untouched])


@pytest.mark.parametrize("rank", [1, 8, 13, 64])
@pytest.mark.parametrize("in_size", [96, 577])
def test_lora_apply_matches_reference_at_every_rank(
    dtype: torch.dtype, rank: int, in_size: int
) -> None:
    segments = [(0, 1), (-1, 2), (1, 3), (0, 53), (1, 1)]
    sizes = [576, 77, 1030]
    ranks = [[rank, 8], [5, rank], [0, rank]]
    check_lora(lora_inputs(segments, ranks, in_size=in_size, out_sizes=sizes), dtype)


@pytest.mark.parametrize("segments", [[], [(-1, 4)], [(0, 0), (1, 0)]], ids=str)
def test_lora_apply_without_adapter_tokens_changes_nothing(
    dtype: torch.dtype, segments: list[tuple[int, int]]
) -> None:
    check_lora(lora_inputs(segments, [[8, 8]], out_sizes=[33]), dtype)


def test_lora_apply_refuses_slots_and_ranks_outside_the_weights(dtype: torch.dtype) -> None:
    for slot, rank, message in ((2, 8, "slot 2 of 2"), (0, 12, "rank 12 of 11")):
        inputs = lora_inputs([(0, 1)], [[8, 8]]).to(dtype)
        inputs.batch.segment_slots.fill_(slot)
        inputs.ranks[:, 0] = rank
        with pytest.raises(RuntimeError, match=message):
            cpu.lora_apply(
                inputs.x, inputs.lora_a, inputs.lora_b, inputs.ranks, inputs.batch, inputs.ys
            )


OPTIONS = {
    "plain": {},
    "window": {"window": 70},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [((9, 3), 64, 16), ((4, 4), 80, 16), ((8, 1), 128, 8), ((2, 2), 36, 5), ((2, 1), 256, 32)],
)
def test_attention_matches_reference(
    dtype: torch.dtype,
    options: dict[str, float],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
) -> None:
    inputs = attention_inputs(
        [1, 64, 65, 100],
        [(40, 40), (90, 25), (3, 0)],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=block_size,
    ).to(dtype)
    wide = inputs.to(torch.float64)
    for op, rows in (("paged_decode", slice(4)), ("paged_prefill", slice(4, None))):
        actual = getattr(cpu, op)(
            inputs.query[rows],
            inputs.key_cache,
            inputs.value_cache,
            inputs.batch,
            scale=0.2,
            **options,
        )
        expected = getattr(ops, op)(
            wide.query[rows],
            wide.key_cache,
            wide.value_cache,
            wide.batch,
            scale=0.2,
            backend="reference",
            **options,
        )
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("window", [None, 1500])
def test_long_context_is_split_and_independent_of_its_batch(
    dtype: torch.dtype, window: int | None
) -> None:
    inputs = attention_inputs([5, 2500, 1024], [(2100, 3)], block_size=16).to(dtype)
    wide = inputs.to(torch.float64)
    caches = (inputs.key_cache, inputs.value_cache)
    for op, rows in (("paged_decode", slice(3)), ("paged_prefill", slice(3, None))):
        run, options = getattr(cpu, op), {"scale": 0.2, "window": window}
        actual = run(inputs.query[rows], *caches, inputs.batch, **options)
        expected = getattr(ops, op)(
            wide.query[rows],
            wide.key_cache,
            wide.value_cache,
            wide.batch,
            backend="reference",
            **options,
        )
        assert_close(actual, expected, dtype)
        single = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert torch.equal(actual, run(inputs.query[rows], *caches, inputs.batch, **options))
        finally:
            torch.set_num_threads(single)


def test_attention_refuses_blocks_outside_the_cache(dtype: torch.dtype) -> None:
    inputs = attention_inputs([9]).to(dtype)
    for block in (inputs.key_cache.shape[0], -1):
        inputs.batch.block_tables[0, 1] = block
        with pytest.raises(RuntimeError, match="outside the cache"):
            cpu.paged_decode(
                inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, scale=1.0
            )


def test_store_kv_refuses_slots_outside_the_cache(dtype: torch.dtype) -> None:
    cache, key = torch.zeros(2, 4, 1, 8, dtype=dtype), torch.ones(1, 1, 8, dtype=dtype)
    with pytest.raises(RuntimeError, match="slot 8 of 8"):
        cpu.store_kv(key, key, cache, cache.clone(), torch.tensor([8]))
    assert (cache == 0).all()


@pytest.mark.parametrize("shape", [(1, 576), (7, 100), (40, 577), (2, 3)], ids=str)
def test_row_ops_match_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, y = normal(*shape, dtype=dtype) * 9, normal(*shape, dtype=dtype, seed=1)
    weight = normal(shape[1], dtype=dtype)
    expected = ops.rms_norm(x.double(), weight.double(), 1e-5, backend="reference")
    assert_close(cpu.rms_norm(x, weight, 1e-5), expected, dtype)
    expected = ops.silu_and_mul(x.double(), y.double(), backend="reference")
    assert_close(cpu.silu_and_mul(x, y), expected, dtype)


def test_silu_saturates_without_overflow(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], dtype=dtype)
    expected = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]], dtype=dtype)
    torch.testing.assert_close(cpu.silu_and_mul(gate, torch.ones_like(gate)), expected)


@pytest.mark.parametrize("head_size", [64, 36])
def test_rope_turns_strided_heads_in_place(dtype: torch.dtype, head_size: int) -> None:
    fused = normal(5, 6, head_size, dtype=dtype)
    cos, sin = (normal(5, head_size, dtype=dtype, seed=seed) for seed in (1, 2))
    wide = fused.double()
    cpu.apply_rope(fused[:, :3], fused[:, 3:5], cos, sin)
    ops.apply_rope(wide[:, :3], wide[:, 3:5], cos.double(), sin.double(), backend="reference")
    assert_close(fused, wide, dtype)


def test_other_dtypes_run_on_torch() -> None:
    x, weight = torch.ones(2, 8, dtype=torch.float16), torch.ones(3, 8, dtype=torch.float16)
    assert (cpu.linear(x, weight) == 8).all()
    assert (cpu.silu_and_mul(x.double(), x.double()) < 1).all()
