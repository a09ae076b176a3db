"""Gathers a stream's outputs: the first at once, later ones by time.

Each item that crosses processes costs a good part of a millisecond, whatever it holds.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import cast

from engine.outputs import RequestOutput

# One item of a stream costs all processes on its way together about as much CPU time as a small
# model's token. So many streams go at the configured pace; with more each gathers longer, up to
# so many times, which readers do not see yet.
_STREAMS_AT_FULL_PACE = 4
_MAX_SLOWDOWN = 5.0


def crowd_interval_s(interval_s: float, num_streams: int) -> float:
    """Return how long each of so many streams gathers, so that all their items stay few."""
    crowd = num_streams / _STREAMS_AT_FULL_PACE
    return interval_s * min(max(crowd, 1.0), _MAX_SLOWDOWN)


async def coalesce(
    stream: AsyncIterator[list[RequestOutput]], interval_s: Callable[[], float]
) -> AsyncIterator[list[RequestOutput]]:
    """Yield the first outputs as they come, then at most one list for each interval.

    How long that is is asked for anew each time. The last outputs do not wait for it. Closing this
    closes ``stream``.
    """
    gathered = _Gathered(stream)
    try:
        while True:
            outputs = await gathered.take()
            if not outputs:
                return
            yield outputs
            await gathered.wait_until_finished(interval_s())
    finally:
        await gathered.close()


class _Gathered:
    """What a stream has said since it was last asked."""

    def __init__(self, stream: AsyncIterator[list[RequestOutput]]) -> None:
        self._outputs: list[RequestOutput] = []
        self._arrived = asyncio.Event()
        self._finished = asyncio.Event()
        self._failure: Exception | None = None
        self._task = asyncio.create_task(self._gather(stream))

    async def take(self) -> list[RequestOutput]:
        """Return what has come, at least something; nothing when the stream has ended."""
        await self._arrived.wait()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._failure is not None:
            raise self._failure
        if not self._finished.is_set():
            self._arrived.clear()
        return merge_outputs(outputs)

    async def wait_until_finished(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._finished.wait(), timeout_s)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _gather(self, stream: AsyncIterator[list[RequestOutput]]) -> None:
        try:
            # Engines generate with async generators; closing one aborts its request.
            async with aclosing(cast("AsyncGenerator[list[RequestOutput], None]", stream)):
                async for outputs in stream:
                    self._outputs.extend(outputs)
                    self._arrived.set()
        except Exception as error:  # noqa: BLE001  raised again in take()
            self._failure = error
        finally:
            self._finished.set()
            self._arrived.set()


def merge_outputs(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Join the outputs of each sequence, in the order in which sequences first appear."""
    merged: dict[int, RequestOutput] = {}
    for output in outputs:
        earlier = merged.get(output.index)
        merged[output.index] = output if earlier is None else _join(earlier, output)
    return _finish_last(list(merged.values()))


def _finish_last(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Only the last output of a request may say that the request has finished."""
    if any(output.request_finished for output in outputs[:-1]):
        outputs = [replace(output, request_finished=False) for output in outputs]
        outputs[-1] = replace(outputs[-1], request_finished=True)
    return outputs


def _join(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    logprobs = earlier.logprobs
    if later.logprobs is not None:
        logprobs = (earlier.logprobs or ()) + later.logprobs
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        error=earlier.error or later.error,
        timing=earlier.timing or later.timing,
        embedding=earlier.embedding or later.embedding,
    )
