"""A stream's first and last outputs go at once, those between gathered."""

import asyncio
from typing import Any

import pytest

from engine.delivery import Delivery, Stream, crowd_interval_s, merge_outputs
from engine.outputs import FinishReason, PositionLogprobs, RequestOutput, TokenLogprob


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def output(text: str, index: int = 0, request_id: str = "a", **fields: Any) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, index=index, text=text, token_ids=tuple(map(ord, text)), **fields
    )


def logprobs(token_id: int) -> tuple[PositionLogprobs, ...]:
    return (PositionLogprobs(TokenLogprob(token_id, -1.0, 1), ()),)


def opened(delivery: Delivery, request_id: str = "a") -> Stream:
    stream = Stream()
    delivery.open(request_id, stream)
    return stream


async def arrived(stream: Stream) -> list[str] | None:
    """The texts of the item that is there, None if there is none."""
    try:
        async with asyncio.timeout(0.01):
            return [output.text for output in await stream.get()]
    except TimeoutError:
        return None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def delivery(clock: Clock) -> Delivery:
    return Delivery(0.02, clock)


async def test_first_output_does_not_wait_and_later_ones_are_gathered(
    delivery: Delivery, clock: Clock
) -> None:
    stream = opened(delivery)
    delivery.add([output("a")])
    assert await arrived(stream) == ["a"]
    for text in "bc":
        delivery.add([output(text)])
        assert await arrived(stream) is None
    clock.now_s += 0.021
    delivery.add([output("d")])
    assert await arrived(stream) == ["bcd"]


async def test_a_new_stream_does_not_wait_for_the_interval_of_others(delivery: Delivery) -> None:
    old = opened(delivery, "old")
    delivery.add([output("a", request_id="old")])
    assert await arrived(old) == ["a"]
    new = opened(delivery, "new")
    delivery.add([output("b", request_id="old"), output("x", request_id="new")])
    assert await arrived(new) == ["x"]
    assert await arrived(old) is None


async def test_last_output_does_not_wait_and_ends_the_stream(delivery: Delivery) -> None:
    stream = opened(delivery)
    delivery.add([output("a")])
    assert await arrived(stream) == ["a"]
    delivery.add([output("b")])
    delivery.add([output("c", request_finished=True)])
    assert await arrived(stream) == ["bc"]
    assert not delivery.close("a", stream)


async def test_what_is_held_goes_before_a_pause(delivery: Delivery) -> None:
    stream = opened(delivery)
    delivery.add([output("a")])
    delivery.add([output("b")])
    delivery.flush()
    assert await arrived(stream) == ["ab"]


async def test_streams_are_told_in_one_wake_of_their_loop(
    delivery: Delivery, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"r{i}" for i in range(8)]
    streams = {name: opened(delivery, name) for name in names}
    loop = asyncio.get_running_loop()
    wakes = 0
    call_soon = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return call_soon(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    for _ in range(5):
        delivery.add([output("a", request_id=name) for name in names])
    assert wakes == 1
    clock.now_s += 1
    delivery.add([output("a", request_id=name) for name in names])
    assert wakes == 2
    assert [await arrived(stream) for stream in streams.values()] == [["aaaaaa"]] * 8


async def test_a_closed_stream_is_told_nothing(delivery: Delivery, clock: Clock) -> None:
    stream = opened(delivery)
    delivery.add([output("a")])
    delivery.add([output("b")])
    assert delivery.close("a", stream)
    clock.now_s += 1
    delivery.add([output("c")])
    assert await arrived(stream) == ["a"]
    assert await arrived(stream) is None


async def test_an_old_stream_does_not_close_a_new_one_of_its_id(delivery: Delivery) -> None:
    old, new = opened(delivery), opened(delivery)
    assert not delivery.close("a", old)
    delivery.add([output("a")])
    assert await arrived(new) == ["a"]


async def test_failure_comes_after_what_was_said_before_it(delivery: Delivery) -> None:
    stream = opened(delivery)
    delivery.add([output("a")])
    assert await arrived(stream) == ["a"]
    delivery.add([output("b")])
    delivery.fail(RuntimeError("broken"))
    assert await arrived(stream) == ["b"]
    with pytest.raises(RuntimeError, match="broken"):
        await stream.get()


def test_outputs_of_a_sequence_are_joined_in_order() -> None:
    merged = merge_outputs(
        [
            output("a", prompt_logprobs=(None,), logprobs=logprobs(1), num_output_tokens=1),
            output("x", index=1),
            output("b", logprobs=logprobs(2), num_output_tokens=2),
            output("c", num_output_tokens=3, finish_reason=FinishReason.STOP, stop_reason=7),
        ]
    )
    assert [(o.index, o.text) for o in merged] == [(0, "abc"), (1, "x")]
    first = merged[0]
    assert first.token_ids == tuple(map(ord, "abc"))
    assert first.prompt_logprobs == (None,)
    assert first.logprobs == logprobs(1) + logprobs(2)
    assert (first.num_output_tokens, first.finish_reason, first.stop_reason) == (3, "stop", 7)


def test_only_the_last_output_says_that_the_request_finished() -> None:
    finished = merge_outputs(
        [output("a"), output("b", index=1), output("c", request_finished=True)]
    )
    assert [o.request_finished for o in finished] == [False, True]


@pytest.mark.parametrize(
    ("num_streams", "expected"), [(0, 0.02), (1, 0.02), (4, 0.02), (8, 0.04), (1000, 0.1)]
)
def test_many_streams_gather_longer_up_to_a_bound(num_streams: int, expected: float) -> None:
    assert crowd_interval_s(0.02, num_streams) == pytest.approx(expected)
    assert crowd_interval_s(0.0, num_streams) == 0
