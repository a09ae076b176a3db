"""The first output comes at once, later ones gathered, the last without waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import pytest

from deployments.coalesce import coalesce, crowd_interval_s, merge_outputs
from engine.outputs import FinishReason, PositionLogprobs, RequestOutput, TokenLogprob

NEVER_S = 1000.0


class Script:
    """A stream whose outputs a test releases one by one."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[RequestOutput] | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def stream(self) -> AsyncIterator[list[RequestOutput]]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True

    def say(self, *texts: str) -> None:
        for text in texts:
            self.queue.put_nowait([output(text)])


def output(text: str, index: int = 0, **fields: Any) -> RequestOutput:
    return RequestOutput(
        request_id="a", index=index, text=text, token_ids=tuple(map(ord, text)), **fields
    )


def logprobs(token_id: int) -> tuple[PositionLogprobs, ...]:
    return (PositionLogprobs(TokenLogprob(token_id, -1.0, 1), ()),)


async def test_first_output_does_not_wait_and_later_ones_are_gathered() -> None:
    script = Script()
    stream = coalesce(script.stream(), lambda: 0.02)
    script.say("a")
    assert [o.text for o in await anext(stream)] == ["a"]
    script.say("b", "c", "d")
    assert [o.text for o in await anext(stream)] == ["bcd"]
    script.queue.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_last_output_does_not_wait_for_the_interval() -> None:
    script = Script()
    script.say("a")
    stream = coalesce(script.stream(), lambda: NEVER_S)
    await anext(stream)
    script.say("b", "c")
    script.queue.put_nowait(None)
    assert [o.text for o in await anext(stream)] == ["bc"]


async def test_failure_comes_after_what_was_said_before_it() -> None:
    script = Script()
    script.say("a")
    stream = coalesce(script.stream(), lambda: NEVER_S)
    await anext(stream)
    script.say("b")
    script.queue.put_nowait(RuntimeError("broken"))
    assert [o.text for o in await anext(stream)] == ["b"]
    with pytest.raises(RuntimeError, match="broken"):
        await anext(stream)


async def test_closing_closes_the_source() -> None:
    script = Script()
    script.say("a")
    async with aclosing(cast("Any", coalesce(script.stream(), lambda: NEVER_S))) as stream:
        await anext(stream)
    assert script.is_closed


async def test_cancelled_consumer_closes_the_source() -> None:
    script = Script()

    async def consume() -> None:
        async with aclosing(cast("Any", coalesce(script.stream(), lambda: NEVER_S))) as stream:
            await anext(stream)

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))
    assert script.is_closed


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


async def test_the_interval_is_asked_for_anew_each_time() -> None:
    script = Script()
    intervals = iter([0.0, NEVER_S])
    stream = coalesce(script.stream(), lambda: next(intervals))
    for text in "ab":
        script.say(text)
        assert [o.text for o in await anext(stream)] == [text]
    script.say("c")
    script.queue.put_nowait(None)
    assert [o.text for o in await anext(stream)] == ["c"]
