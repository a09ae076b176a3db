"""The threads of the C++ ops: they change no result, and torch's stay out of the way."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import cpu
from kernels.threads import set_num_threads
from tests.kernels.test_cpu_ops import normal

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="the C++ ops are not built (python -m kernels.build)"
)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    count, of_torch = cpu.num_threads(), torch.get_num_threads()
    yield
    set_num_threads(count)
    torch.set_num_threads(of_torch)


def test_results_are_the_same_with_any_number_of_threads() -> None:
    x, weight = normal(19, 577, dtype=torch.bfloat16), normal(4099, 577, dtype=torch.bfloat16)
    set_num_threads(1)
    alone = cpu.linear(x, weight)
    for count in (2, 5, 1, 3):
        set_num_threads(count)
        for _ in range(20):
            assert torch.equal(cpu.linear(x, weight), alone)


def test_jobs_at_the_same_time_do_not_mix() -> None:
    set_num_threads(3)
    weights = [normal(2000, 300, dtype=torch.float32, seed=seed) for seed in range(4)]
    x = normal(5, 300, dtype=torch.float32)
    expected = [cpu.linear(x, weight) for weight in weights]

    def repeat(number: int) -> bool:
        results = (cpu.linear(x, weights[number]) for _ in range(100))
        return all(torch.equal(result, expected[number]) for result in results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def test_torch_keeps_one_thread_and_is_lent_more_for_what_it_does_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_tiles_min_rows", 1)
    seen = []

    def linear(*args: torch.Tensor | None) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.zeros(())

    monkeypatch.setattr("kernels.torch_ops.linear", linear)
    set_num_threads(2)
    set_num_threads(None)
    assert (cpu.num_threads(), torch.get_num_threads()) == (2, 1)
    cpu.linear(normal(1, 8, dtype=torch.bfloat16), normal(4, 8, dtype=torch.bfloat16))
    assert seen == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("tiles_min_rows", "dtype", "rows", "expected"),
    [
        (None, torch.bfloat16, 4096, False),
        (32, torch.bfloat16, 31, False),
        (32, torch.bfloat16, 32, True),
        # Tiles multiply no float32.
        (32, torch.float32, 4096, False),
    ],
)
def test_torch_is_preferred_for_many_rows_on_hardware_with_tiles_alone(
    monkeypatch: pytest.MonkeyPatch,
    tiles_min_rows: int | None,
    dtype: torch.dtype,
    rows: int,
    expected: bool,
) -> None:
    monkeypatch.setattr(cpu, "_tiles_min_rows", tiles_min_rows)
    assert cpu.prefers_torch(torch.zeros(rows, 8, dtype=dtype)) is expected


def test_tiles_are_used_where_torch_says_that_there_are_some() -> None:
    assert (cpu._tiles_min_rows is not None) == torch.cpu._is_amx_tile_supported()
