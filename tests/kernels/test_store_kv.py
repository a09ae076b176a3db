"""Every backend's write into the paged cache against the reference, bit for bit."""

import pytest
import torch

from kernels import ops
from kernels.backend import Backend
from tests.kernels.cases import backends, device_of

MAPPINGS = {
    "one token": [5],
    "scattered": [11, 0, 7, 3],
    "some write nothing": [-1, 4, -1, 9, -1],
    "none writes": [-1, -1],
    "no tokens": [],
}


def random_kv(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values that are views of one packed projection."""
    packed = torch.randn(num_tokens, 6, 24).to(dtype)
    return packed[:, :3], packed[:, 3:]


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS.keys())
@pytest.mark.parametrize(("backend", "dtype"), backends("store_kv"))
def test_store_matches_reference(backend: Backend, dtype: torch.dtype, mapping: list[int]) -> None:
    torch.manual_seed(0)
    slot_mapping = torch.tensor(mapping, dtype=torch.int64)
    key, value = random_kv(len(mapping), dtype)
    before = torch.randn(2, 3, 4, 3, 24).to(dtype)
    expected = before.clone()
    ops.store_kv(key, value, expected[0], expected[1], slot_mapping, backend="reference")
    device = device_of(backend)
    actual = before.clone().to(device)
    ops.store_kv(
        key.to(device),
        value.to(device),
        actual[0],
        actual[1],
        slot_mapping.to(device),
        backend=backend,
    )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize(("backend", "dtype"), backends("store_kv"))
def test_stored_vectors_lie_at_block_and_offset(backend: Backend, dtype: torch.dtype) -> None:
    device = device_of(backend)
    key, value = (part.to(device) for part in random_kv(1, dtype))
    caches = torch.zeros(2, 3, 4, 3, 24, dtype=dtype, device=device)
    position = torch.tensor([2 * 4 + 3], device=device)
    ops.store_kv(key, value, caches[0], caches[1], position, backend=backend)
    assert torch.equal(caches[0, 2, 3], key[0])
    assert torch.equal(caches[1, 2, 3], value[0])
    assert int(caches.abs().sum((-1, -2)).count_nonzero()) == 2
