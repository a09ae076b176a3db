"""From the engine's thread to its callers' event loops: each request's outputs, gathered by time.

Each item that wakes an event loop, or crosses processes later, costs about as much as a small
model's token, whatever it holds. So a stream's first outputs go at once, later ones when an
interval is over, those of all streams in the same moment; last ones wait for nothing.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from engine.outputs import RequestOutput

# So many streams go at the configured pace; with more each gathers longer, up to so many times,
# which readers do not see yet.
_STREAMS_AT_FULL_PACE = 4
_MAX_SLOWDOWN = 5.0

_Item = list[RequestOutput] | Exception


def crowd_interval_s(interval_s: float, num_streams: int) -> float:
    """Return how long each of so many streams gathers, so that all their items stay few."""
    crowd = num_streams / _STREAMS_AT_FULL_PACE
    return interval_s * min(max(crowd, 1.0), _MAX_SLOWDOWN)


class Stream:
    """Where the outputs of one request go: a queue in its caller's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Add an item, in the stream's own loop."""
        self._queue.put_nowait(item)

    async def get(self) -> list[RequestOutput]:
        """Return what has come since the last call, at least one output."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        outputs = list(item)
        while not self._queue.empty():
            following = self._queue.get_nowait()
            if isinstance(following, Exception):
                # It waits its turn: what came before it is returned first.
                self._queue.put_nowait(following)
                break
            outputs += following
        return merge_outputs(outputs)


class Delivery:
    """The open streams of an engine and what they have not been told yet. For one thread."""

    def __init__(
        self, interval_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = 0.0
        self._streams: dict[str, Stream] = {}
        self._held: dict[str, list[RequestOutput]] = {}
        self._silent: set[str] = set()  # of the streams, those that have not been told anything

    def open(self, request_id: str, stream: Stream) -> None:
        """Tell this stream of a request from now on."""
        self._streams[request_id] = stream
        self._silent.add(request_id)

    def close(self, request_id: str, stream: Stream) -> bool:
        """Tell this stream nothing more; returns whether it was still open."""
        if self._streams.get(request_id) is not stream:
            return False
        self._forget(request_id)
        return True

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the outputs of a step, and hand over what is due."""
        urgent: dict[str, None] = {}
        for output in outputs:
            if output.request_id not in self._streams:
                continue
            self._held.setdefault(output.request_id, []).append(output)
            if output.request_finished or output.request_id in self._silent:
                urgent[output.request_id] = None
        if self._clock() >= self._due_s:
            self.flush()
        else:
            self._hand_over(urgent)

    def flush(self) -> None:
        """Hand over everything, as before a pause."""
        if self._held:
            self._due_s = self._clock() + crowd_interval_s(self._interval_s, len(self._streams))
            self._hand_over(self._held)

    def fail(self, error: Exception) -> None:
        """End every stream with an error, after what it has not been told yet."""
        self.flush()
        _put_all([(stream, error) for stream in self._streams.values()])
        for request_id in tuple(self._streams):
            self._forget(request_id)

    def _hand_over(self, request_ids: dict[str, None] | dict[str, list[RequestOutput]]) -> None:
        items: list[tuple[Stream, _Item]] = []
        for request_id in tuple(request_ids):
            outputs = self._held.pop(request_id)
            items.append((self._streams[request_id], outputs))
            self._silent.discard(request_id)
            if outputs[-1].request_finished:
                self._forget(request_id)
        _put_all(items)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        self._held.pop(request_id, None)
        self._silent.discard(request_id)


def _put_all(items: Sequence[tuple[Stream, _Item]]) -> None:
    """Put each item into its stream, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, _Item]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, pairs in by_loop.items():
        # A closed loop has nobody left to tell.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_put, pairs)


def _put(pairs: Sequence[tuple[Stream, _Item]]) -> None:
    for stream, item in pairs:
        stream.put(item)


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
