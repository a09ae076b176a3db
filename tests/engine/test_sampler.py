"""Each sampling parameter does what it says, checked on known logits."""

import random
from collections import Counter

import pytest
import torch

from engine import sampler
from engine.request import Request
from engine.sampler import NonFiniteLogitsError, SamplingState, position_logprobs, sample
from engine.sampling_params import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])
EOS = frozenset({3})


@pytest.fixture(autouse=True, params=["host", "device"])
def place_of_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test twice: drawn row by row as on a CPU, and all rows at once as on a GPU."""
    monkeypatch.setattr(sampler, "_draws_on_device", lambda logits: request.param == "device")


def make_state(prompt: tuple[int, ...] = (0,), index: int = 0, **params: object) -> SamplingState:
    request = Request(
        request_id="r",
        index=index,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
    )
    return SamplingState.create(request, EOS, random.Random(0))


def choose(state: SamplingState, logits: torch.Tensor = LOGITS) -> int:
    return sample(logits.clone().unsqueeze(0), [state])[0].token_id


def draw_many(num: int = 1500, logits: torch.Tensor = LOGITS, **params: object) -> Counter[int]:
    state = make_state(seed=1, **params)
    return Counter(choose(state, logits) for _ in range(num))


def test_temperature_zero_takes_the_most_likely() -> None:
    assert choose(make_state(temperature=0)) == 1


def test_draws_follow_the_softmax() -> None:
    counts = draw_many(temperature=1.0)
    expected = LOGITS.softmax(-1)
    for token_id, probability in enumerate(expected.tolist()):
        assert counts[token_id] / 1500 == pytest.approx(probability, abs=0.04)


def test_temperature_flattens_the_distribution() -> None:
    counts = draw_many(temperature=3.0)
    expected = (LOGITS / 3).softmax(-1)
    assert counts[1] / 1500 == pytest.approx(float(expected[1]), abs=0.04)


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(draw_many(top_k=2, temperature=5.0)) == {1, 2}


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    first, second = LOGITS.softmax(-1)[[1, 2]].tolist()
    assert set(draw_many(top_p=first - 0.01)) == {1}
    assert set(draw_many(top_p=first + 0.01)) == {1, 2}
    assert set(draw_many(top_p=first + second + 0.01)) == {0, 1, 2}


def test_top_p_is_right_when_the_mass_is_spread_over_the_whole_vocabulary() -> None:
    flat = torch.zeros(5000)
    flat[:2500] = 0.001
    counts = draw_many(500, flat, top_p=0.4)
    assert max(counts) < 2500 and len(counts) > 300


def test_top_p_applies_after_top_k() -> None:
    assert set(draw_many(top_k=2, top_p=0.6, temperature=1.0)) == {1}


def test_min_p_is_relative_to_the_most_likely() -> None:
    ratio = float(torch.exp(LOGITS[2] - LOGITS[1]))
    assert set(draw_many(min_p=ratio - 0.01)) == {1, 2}
    assert set(draw_many(min_p=ratio + 0.01)) == {1}


def test_seed_repeats_and_does_not_depend_on_the_batch() -> None:
    alone = make_state(seed=7)
    first = [choose(alone) for _ in range(20)]
    again, other = make_state(seed=7), make_state(seed=8)
    second = []
    for _ in range(20):
        both = sample(torch.stack([LOGITS, LOGITS]), [other, again])
        second.append(both[1].token_id)
    assert second == first
    sibling = make_state(seed=7, index=1)
    assert [choose(sibling) for _ in range(20)] != first


def test_logit_bias_can_force_and_forbid() -> None:
    assert choose(make_state(temperature=0, logit_bias=((4, 100.0),))) == 4
    assert choose(make_state(temperature=0, logit_bias=((1, -100.0),))) == 2


def test_min_tokens_holds_back_every_way_to_stop() -> None:
    likely_eos = torch.tensor([0.0, 0.0, 8.0, 9.0, 1.0])
    state = make_state(temperature=0, min_tokens=2, stop_token_ids=(2,))
    assert [choose(state, likely_eos) for _ in range(3)] == [4, 4, 3]


def test_ignore_eos_leaves_the_eos_token_unmasked() -> None:
    likely_eos = torch.tensor([0.0, 0.0, 0.0, 9.0, 1.0])
    assert choose(make_state(temperature=0, min_tokens=2, ignore_eos=True), likely_eos) == 3


def test_presence_penalty_counts_output_once_and_frequency_each_time() -> None:
    flat = torch.tensor([0.0, 1.0, 0.5, 0.2, 0.1])
    presence = make_state(temperature=0, presence_penalty=0.6)
    assert [choose(presence, flat) for _ in range(3)] == [1, 2, 1]
    frequency = make_state(temperature=0, frequency_penalty=0.6)
    assert [choose(frequency, flat) for _ in range(4)] == [1, 2, 1, 3]


def test_presence_penalty_ignores_the_prompt() -> None:
    state = make_state(prompt=(1,), temperature=0, presence_penalty=2.0)
    assert choose(state, torch.tensor([0.0, 1.0, 0.5])) == 1


def test_repetition_penalty_counts_the_prompt_and_pushes_both_signs_down() -> None:
    state = make_state(prompt=(1,), temperature=0, repetition_penalty=3.0)
    assert choose(state, torch.tensor([0.0, 1.0, 0.5])) == 2
    state = make_state(prompt=(0,), temperature=0, repetition_penalty=3.0)
    assert choose(state, torch.tensor([-1.0, -2.0, -4.0])) == 1


def test_logprobs_are_of_the_raw_logits() -> None:
    state = make_state(temperature=0, logit_bias=((4, 100.0),), logprobs=2)
    sampled = sample(LOGITS.clone().unsqueeze(0), [state])[0]
    expected = LOGITS.log_softmax(-1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.token_id == 4
    assert sampled.logprobs.chosen.logprob == pytest.approx(float(expected[4]))
    assert sampled.logprobs.chosen.rank == 5
    assert [entry.token_id for entry in sampled.logprobs.top] == [1, 2]


def test_zero_top_logprobs_still_give_the_chosen_token() -> None:
    (logprobs,) = position_logprobs(LOGITS[None], [2], [0])
    assert logprobs.top == () and logprobs.chosen.rank == 2


def test_many_rows_have_the_log_probabilities_of_each() -> None:
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(2))
    token_ids = [row % 40 for row in range(150)]
    num_tops = [row % 4 for row in range(150)]
    together = position_logprobs(logits, token_ids, num_tops)
    for row, found in enumerate(together):
        expected = logits[row].double().log_softmax(-1)
        order = expected.argsort(descending=True).tolist()
        assert found.chosen.logprob == pytest.approx(float(expected[row % 40]), abs=1e-5)
        assert found.chosen.rank == order.index(row % 40) + 1
        assert [entry.token_id for entry in found.top] == order[: row % 4]
        assert [entry.rank for entry in found.top] == [*range(1, row % 4 + 1)]
    assert position_logprobs(logits[:0], [], []) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_fail_their_row_only(bad: float) -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, bad), LOGITS])
    states = [make_state(temperature=0), make_state(temperature=0), make_state(temperature=0)]
    good, broken, other = sample(logits, states)
    assert isinstance(broken.error, NonFiniteLogitsError)
    assert (good.token_id, other.token_id) == (1, 1)


def test_tiny_temperature_is_greedy_and_large_logits_do_not_overflow() -> None:
    assert choose(make_state(temperature=1e-30)) == 1
    huge = torch.tensor([1e30, 3e30, 2e30])
    assert choose(make_state(temperature=0.01, seed=1), huge) == 1
