"""Every backend's dense ops against the reference in float64."""

import pytest
import torch

from kernels import ops
from kernels.backend import Backend
from tests.kernels.cases import assert_close, backends, device_of

SHAPES = [(1, 32), (5, 67), (0, 16), (3, 1)]


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
@pytest.mark.parametrize(("backend", "dtype"), backends("linear"))
def test_linear_matches_reference(
    backend: Backend, dtype: torch.dtype, num_tokens: int, width: int, *, has_bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, width).to(dtype)
    weight = (torch.randn(19, width) / width**0.5).to(dtype)
    bias = torch.randn(19).to(dtype) if has_bias else None
    device = device_of(backend)
    there = None if bias is None else bias.to(device)
    actual = ops.linear(x.to(device), weight.to(device), there, backend=backend)
    wide = None if bias is None else bias.double()
    expected = ops.linear(x.double(), weight.double(), wide, backend="reference")
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
@pytest.mark.parametrize(("backend", "dtype"), backends("rms_norm"))
def test_rms_norm_matches_reference(
    backend: Backend, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, width).to(dtype), torch.randn(width).to(dtype)
    device = device_of(backend)
    actual = ops.rms_norm(x.to(device), weight.to(device), 1e-5, backend=backend)
    expected = ops.rms_norm(x.double(), weight.double(), 1e-5, backend="reference")
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
@pytest.mark.parametrize(("backend", "dtype"), backends("add_rms_norm"))
def test_add_rms_norm_is_an_addition_in_place_and_a_norm(
    backend: Backend, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    torch.manual_seed(0)
    stream, update = torch.randn(2, num_tokens, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    device = device_of(backend)
    sums = stream + update
    stream = stream.to(device)
    actual = ops.add_rms_norm(stream, update.to(device), weight.to(device), 1e-5, backend=backend)
    expected = ops.rms_norm(sums.double(), weight.double(), 1e-5, backend="reference")
    assert torch.equal(stream.cpu(), sums)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
@pytest.mark.parametrize(("backend", "dtype"), backends("silu_and_mul"))
def test_silu_and_mul_matches_reference(
    backend: Backend, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, num_tokens, width).to(dtype)
    device = device_of(backend)
    actual = ops.silu_and_mul(gate.to(device), up.to(device), backend=backend)
    expected = ops.silu_and_mul(gate.double(), up.double(), backend="reference")
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize(
    ("backend", "dtype"), [row for row in backends("silu_and_mul") if row.values[0] != "cpu"]
)
def test_gate_and_up_may_be_parts_of_one_tensor(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = torch.randn(5, 2 * 67).to(dtype)
    gate, up = both.to(device_of(backend)).split(67, dim=1)
    actual = ops.silu_and_mul(gate, up, backend=backend)
    wide_gate, wide_up = both.double().split(67, dim=1)
    expected = ops.silu_and_mul(wide_gate, wide_up, backend="reference")
    assert_close(actual, expected, dtype)
