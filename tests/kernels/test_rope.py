"""The ops that a fused decoder layer adds, against the reference."""

import pytest
import torch

from kernels import ops
from kernels.backend import Backend
from tests.kernels.cases import assert_close, backends, device_of


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 8), (3, 1, 80)])
@pytest.mark.parametrize(("backend", "dtype"), backends("apply_rope"))
def test_apply_rope_matches_reference(
    backend: Backend,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    torch.manual_seed(0)
    # One wide projection, cut into heads: rows are not dense.
    heads = torch.randn(num_tokens, num_heads + num_kv_heads, head_dim).to(dtype)
    angles = torch.randn(num_tokens, head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = heads.double()
    query, key = expected.split([num_heads, num_kv_heads], dim=1)
    ops.apply_rope(query, key, cos.double(), sin.double(), backend="reference")

    device = device_of(backend)
    heads = heads.to(device)
    query, key = heads.split([num_heads, num_kv_heads], dim=1)
    ops.apply_rope(query, key, cos.to(device), sin.to(device), backend=backend)
    assert_close(heads, expected, dtype)


@pytest.mark.parametrize(("backend", "dtype"), backends("linear_multi"))
def test_linear_multi_is_linear_for_each_weight(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    device = device_of(backend)
    x = torch.randn(5, 67).to(device, dtype)
    weights = [(torch.randn(n, 67) / 8).to(device, dtype) for n in (19, 5, 5)]
    biases = [torch.randn(19).to(device, dtype), None, torch.randn(5).to(device, dtype)]
    results = ops.linear_multi(x, weights, biases, backend=backend)
    for actual, weight, bias in zip(results, weights, biases, strict=True):
        wide = None if bias is None else bias.double()
        expected = ops.linear(x.double(), weight.double(), wide, backend="reference")
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("mapping", [[3], [7, -1, 0, 11, 4]], ids=["one token", "some unwritten"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 8), (3, 1, 80)])
@pytest.mark.parametrize(("backend", "dtype"), backends("store_kv"))
def test_rope_and_store_does_what_the_two_do(
    backend: Backend,
    dtype: torch.dtype,
    mapping: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    torch.manual_seed(0)
    heads = torch.randn(len(mapping), num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.randn(len(mapping), head_dim // 2).repeat(1, 2)
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
    caches = torch.randn(2, 3, 4, num_kv_heads, head_dim).to(dtype)
    positions = torch.tensor(mapping)
    sizes = [num_heads, num_kv_heads, num_kv_heads]

    wide, wide_caches = heads.double(), caches.double()
    query, key, value = wide.split(sizes, dim=1)
    wide_rotary = (rotary[0].double(), rotary[1].double())
    ops.rope_and_store_kv(
        query, key, value, wide_rotary, *wide_caches, positions, backend="reference"
    )

    device = device_of(backend)
    heads, caches = heads.to(device), caches.to(device)
    there = (rotary[0].to(device), rotary[1].to(device))
    rows = heads.split(sizes, dim=1)
    ops.rope_and_store_kv(*rows, there, *caches, positions.to(device), backend=backend)
    assert_close(rows[0], query, dtype)
    assert_close(caches, wide_caches, dtype)
