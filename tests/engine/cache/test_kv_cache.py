import pytest
import torch

from engine.cache.kv_cache import KVShape, allocate_kv, num_blocks_that_fit
from engine.config import CacheConfig

LAYERS = [KVShape(2, 8, torch.float32), KVShape(1, 16, torch.bfloat16)]
BLOCK_BYTES = 4 * 2 * (2 * 8 * 4 + 1 * 16 * 2)


def test_as_many_blocks_as_memory_holds() -> None:
    config = CacheConfig(block_size=4, memory_bytes=10 * BLOCK_BYTES + 1)
    assert num_blocks_that_fit(LAYERS, config) == 10


def test_memory_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="one KV block takes"):
        num_blocks_that_fit(LAYERS, CacheConfig(block_size=4, memory_bytes=BLOCK_BYTES - 1))


def test_given_number_of_blocks_wins() -> None:
    assert num_blocks_that_fit(LAYERS, CacheConfig(num_blocks=3, memory_bytes=1)) == 3


def test_caches_are_zeroed_and_apart() -> None:
    kv = allocate_kv(LAYERS[1], 3, 4, torch.device("cpu"))
    assert kv.key.shape == kv.value.shape == (3, 4, 1, 16)
    assert kv.key.dtype == torch.bfloat16
    assert kv.scales is None
    kv.key.fill_(1)
    assert not kv.value.any()


def test_quantised_caches_have_a_scale_for_each_vector() -> None:
    shape = LAYERS[1].quantised()
    kv = allocate_kv(shape, 3, 4, torch.device("cpu"))
    assert kv.key.dtype == kv.value.dtype == torch.float8_e4m3fn
    assert kv.scales is not None
    assert kv.scales.key.shape == kv.scales.value.shape == (3, 4, 1)
    tensors = (kv.key, kv.value, kv.scales.key, kv.scales.value)
    assert sum(tensor.nbytes for tensor in tensors) == 3 * shape.block_bytes(4)
