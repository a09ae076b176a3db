"""sample_tokens on every backend: the reference's very tokens, and its distribution."""

import pytest
import torch

from kernels import ops
from kernels.backend import Backend
from kernels.gumbel import gumbel_noise
from tests.kernels.cases import INTERPRETED, device_of

BACKENDS: list[Backend] = ["triton"] if INTERPRETED else ["torch"]
VOCAB = 83

# temperature, top_k, top_p, min_p
PARAMS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "all tokens": (1.0, 0, 1.0, 0.0),
    "hot": (3.0, 0, 1.0, 0.0),
    "one token": (1.0, 1, 1.0, 0.0),
    "top k": (0.8, 5, 1.0, 0.0),
    "more than there are": (0.8, VOCAB + 5, 1.0, 0.0),
    "top p": (1.0, 0, 0.7, 0.0),
    "tiny top p": (1.0, 0, 1e-6, 0.0),
    "min p": (1.5, 0, 1.0, 0.2),
    "all three": (1.2, 12, 0.8, 0.01),
}


def sample(
    logits: torch.Tensor, params: tuple[float, ...], seeds: torch.Tensor, backend: Backend
) -> torch.Tensor:
    device = device_of(backend)
    rows = torch.tensor(params, dtype=torch.float32).expand(logits.shape[0], 4).contiguous()
    return ops.sample_tokens(
        logits.to(device), rows.to(device), seeds.to(device), backend=backend
    ).cpu()


def random_seeds(num_rows: int) -> torch.Tensor:
    return torch.randint(1 << 62, (num_rows,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many ties"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_the_references(
    backend: Backend, params: tuple[float, ...], *, rounded: bool
) -> None:
    torch.manual_seed(0)
    num_rows = 4 if INTERPRETED else 24
    logits = torch.randn(num_rows, VOCAB) * 2
    if rounded:
        logits = logits.round()
    seeds = random_seeds(num_rows)
    expected = sample(logits, params, seeds, "reference")
    assert torch.equal(sample(logits, params, seeds, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_batch_do_not_matter_to_each_other(backend: Backend) -> None:
    torch.manual_seed(0)
    logits, seeds = torch.randn(3, VOCAB), random_seeds(3)
    together = sample(logits, (1.0, 20, 0.9, 0.0), seeds, backend)
    alone = [
        sample(logits[i : i + 1], (1.0, 20, 0.9, 0.0), seeds[i : i + 1], backend) for i in range(3)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_finite_say_so(backend: Backend) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = float("nan")
    logits[1, 7] = float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    for params in (PARAMS["greedy"], PARAMS["all three"]):
        assert sample(logits, params, random_seeds(4), backend).tolist() == [-1, -1, -1, 0]


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_no_rows_give_no_tokens(backend: Backend) -> None:
    assert sample(torch.zeros(0, VOCAB), (1.0, 0, 1.0, 0.0), random_seeds(0), backend).shape == (0,)


@pytest.mark.skipif(INTERPRETED, reason="too many rows for the interpreter")
def test_frequencies_are_the_distribution() -> None:
    num_rows = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    probs = logits.softmax(0)
    tokens = sample(logits.expand(num_rows, 5), (1.0, 0, 1.0, 0.0), random_seeds(num_rows), "torch")
    counts = torch.bincount(tokens, minlength=5)
    chi_square = float(((counts - num_rows * probs) ** 2 / (num_rows * probs)).sum())
    # The 0.9999 quantile of chi square with 4 degrees of freedom; the seeds are fixed.
    assert chi_square < 23.5


def test_noise_is_gumbels() -> None:
    noise = gumbel_noise(random_seeds(40), 500).flatten()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05
