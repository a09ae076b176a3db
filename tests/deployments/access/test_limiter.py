"""Limits hold in every minute and at every moment, and nothing that was taken stays taken."""

import random
from collections import deque
from copy import deepcopy

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deployments.access.key_holder import Limits
from deployments.access.limiter import Limiter, Quota, Ticket
from deployments.access.minute_window import MinuteWindow
from deployments.errors import LimitExceededError
from tests.deployments.fake_clock import FakeClock, SteppedClock


def refused(limiter: Limiter, quotas: list[Quota], num_tokens: int = 0) -> LimitExceededError:
    with pytest.raises(LimitExceededError) as caught:
        limiter.admit(quotas, num_tokens)
    return caught.value


@given(
    steps=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 4)), max_size=60),
    limit=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_no_span_of_a_minute_holds_more_than_the_limit(
    steps: list[tuple[float, int]], limit: int
) -> None:
    window, now = MinuteWindow(), 1000.0
    admitted: deque[tuple[float, int]] = deque()
    for seconds, amount in steps:
        now += seconds
        wait_s = window.wait_s(now, limit - amount)
        if wait_s == 0 and amount <= limit:
            window.add(now, amount)
            admitted.append((now, amount))
        elif amount <= limit:
            assert 0 < wait_s <= 61
            later = deepcopy(window)
            assert later.wait_s(now + wait_s + 1e-6, limit - amount) == 0, "long enough"
        span = sum(amount for at, amount in admitted if at > now - 60)
        assert span <= limit


def test_requests_and_tokens_are_counted_on_key_and_adapter_or_on_neither() -> None:
    limiter = Limiter(FakeClock())
    key = Quota("key a", Limits(requests_per_minute=3, tokens_per_minute=100))
    adapter = Quota("model sql", Limits(requests_per_minute=2))
    limiter.admit([key, adapter], 10).close()
    limiter.admit([key, adapter], 10).close()
    assert refused(limiter, [key, adapter]).whose == "model sql"
    limiter.admit([key], 0).close()
    error = refused(limiter, [key])
    assert (error.whose, error.limit) == ("key a", "requests_per_minute")
    assert 59 < error.retry_after_s <= 61


def test_unspent_tokens_come_back_and_overspent_ones_are_counted() -> None:
    clock = SteppedClock()
    limiter = Limiter(clock)
    quotas = [Quota("key a", Limits(tokens_per_minute=100))]
    ticket = limiter.admit(quotas, 80)
    assert refused(limiter, quotas, 30).limit == "tokens_per_minute"
    ticket.spend(10)
    ticket.close()
    standing = limiter.tokens_left(quotas)
    assert standing is not None and standing.remaining == 90
    ticket = limiter.admit(quotas, 30)
    ticket.spend(200)
    assert refused(limiter, quotas).limit == "tokens_per_minute"
    ticket.close()
    ticket.close()
    ticket.spend(5)
    clock.step(61)
    limiter.admit(quotas, 100).close()


def test_more_tokens_than_a_minute_has_are_let_in_when_it_is_empty() -> None:
    limiter = Limiter(FakeClock())
    quotas = [Quota("key a", Limits(tokens_per_minute=100))]
    with limiter.admit(quotas, 5000) as ticket:
        ticket.spend(5000)
    assert refused(limiter, quotas, 1).limit == "tokens_per_minute"


def test_places_are_never_exceeded_and_never_lost() -> None:
    rng = random.Random(5)
    limiter = Limiter(FakeClock())
    quotas = [
        [Quota(f"key {k}", Limits(concurrent_requests=3)), Quota(f"model {m}", limits)]
        for k in range(3)
        for m, limits in enumerate((Limits(concurrent_requests=2), Limits()))
    ]
    running: list[tuple[list[Quota], Ticket]] = []
    num_refused = 0
    for _ in range(3000):
        if running and rng.random() < 0.5:
            running.pop(rng.randrange(len(running)))[1].close()
            continue
        asked = rng.choice(quotas)
        try:
            running.append((asked, limiter.admit(asked, 0)))
        except LimitExceededError as error:
            assert error.retry_after_s == 1
            num_refused += 1
        for whose, places in (("key 0", 3), ("key 1", 3), ("key 2", 3), ("model 0", 2)):
            assert sum(whose == q.whose for each, _ in running for q in each) <= places
    assert num_refused > 100
    for _, ticket in running:
        ticket.close()
    assert limiter.num_running == 0


def test_a_clock_that_steps_neither_opens_the_gates_nor_shuts_them() -> None:
    clock = SteppedClock()
    limiter = Limiter(clock)
    quotas = [Quota("key a", Limits(requests_per_minute=2))]
    limiter.admit(quotas, 0).close()
    clock.step(-3600)
    limiter.admit(quotas, 0).close()
    refused(limiter, quotas)
    clock.step(3600)
    refused(limiter, quotas)
    clock.step(61.5)
    limiter.admit(quotas, 0).close()
    clock.step(1e9)
    limiter.admit(quotas, 0).close()


def test_names_of_clients_do_not_fill_the_memory() -> None:
    clock = SteppedClock()
    limiter = Limiter(clock)
    kept = limiter.admit([Quota("model kept", Limits())], 0)
    for index in range(20_000):
        limiter.admit([Quota(f"model {index}", Limits(requests_per_minute=5))], 0).close()
        clock.step(1)
    assert len(limiter._accounts) < 3000
    kept.close()
    assert limiter.num_running == 0
