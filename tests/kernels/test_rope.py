"""apply_rope and linear_multi, the ops a fused decoder layer adds, against the reference."""

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
