"""One HTTP request as k generate requests: started together, served by one adapter version.

Knows the backend's streams and their errors. Knows nothing of bodies or response formats.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from deployments.backend import Backend
from deployments.errors import ClusterError, ReplicaUnavailableError
from deployments.generation import GenerateRequest, GenerationItem, GenerationStart
from engine.outputs import FinishReason, RequestOutput

# A replace between two of a request's prompts makes their versions differ; then all start over.
_MAX_STARTS = 4

# How long a finished stream may take to end by itself, rather than be aborted.
_END_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """New output of one sequence, with the number of the prompt that it continues."""

    prompt_index: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


_Arrival = tuple[int, GenerationItem | _Failed]


class Fanout:
    """The merged output of several generate requests.

    ``start`` returns once every request was admitted and one of them has output, so whatever goes
    wrong until then is raised before anything was sent to the client. Whoever called ``start``
    calls ``aclose``, which ends all requests. ``meter`` is told of the tokens that were computed.
    """

    def __init__(self, backend: Backend, requests: Sequence[GenerateRequest]) -> None:
        self._backend = backend
        self._requests = tuple(requests)
        self._arrivals: asyncio.Queue[_Arrival] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._first: list[PromptOutput] = []
        self._starts: dict[int, GenerationStart] = {}
        self._failure: Exception | None = None
        self._num_unfinished = len(self._requests)
        self.meter: Callable[[int], None] = lambda num_tokens: None

    @property
    def requests(self) -> Sequence[GenerateRequest]:
        """What was asked for, prompt by prompt."""
        return self._requests

    def serve_for(self, tenant: str) -> None:
        """Say whose requests these are, before they are started."""
        self._requests = tuple(replace(request, tenant=tenant) for request in self._requests)

    @property
    def starts(self) -> list[GenerationStart]:
        """Who serves each prompt, in prompt order."""
        return [self._starts[index] for index in range(len(self._requests))]

    async def start(self) -> None:
        """Admit all requests; on any error none of them is left running."""
        try:
            for _ in range(_MAX_STARTS):
                await self._start_once()
                if len({start.generation for start in self._starts.values()}) == 1:
                    return
                await self.aclose()
        except BaseException:
            await self.aclose()
            raise
        raise ReplicaUnavailableError("the adapter is being replaced too often; try again")

    async def _start_once(self) -> None:
        self._arrivals = asyncio.Queue()
        self._first, self._starts, self._failure = [], {}, None
        self._num_unfinished = len(self._requests)
        self._pumps = [
            asyncio.create_task(self._pump(index, request, self._arrivals))
            for index, request in enumerate(self._requests)
        ]
        while len(self._starts) < len(self._requests) or not self._first:
            self._first += await self._next_outputs()

    async def outputs(self) -> AsyncIterator[list[PromptOutput]]:
        """Yield what has arrived since the last time, until every request finished."""
        if self._first:
            yield self._first
        while self._num_unfinished:
            outputs = await self._next_outputs()
            if outputs:
                yield outputs

    async def aclose(self) -> None:
        """End all requests and wait until their streams are closed."""
        pumps, self._pumps = self._pumps, []
        if not pumps:
            return
        try:
            if not self._num_unfinished:
                await asyncio.wait(pumps, timeout=_END_GRACE_S)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _next_outputs(self) -> list[PromptOutput]:
        """Wait for one arrival and take along all that is already there.

        A failure waits its turn: what came before it is returned first.
        """
        if self._failure is not None:
            raise self._failure
        outputs = self._accept(*await self._arrivals.get())
        try:
            while not self._arrivals.empty():
                outputs += self._accept(*self._arrivals.get_nowait())
        except Exception as error:
            if not outputs:
                raise
            self._failure = error
        return outputs

    def _accept(self, index: int, item: GenerationItem | _Failed) -> list[PromptOutput]:
        if isinstance(item, _Failed):
            raise item.error
        if isinstance(item, GenerationStart):
            self._starts[index] = item
            self.meter(len(item.prompt_token_ids))
            return []
        for output in item:
            if output.error is not None:
                raise output.error
            if output.finish_reason is FinishReason.ERROR:
                raise ClusterError(f"request {output.request_id} failed without a reason")
            self._num_unfinished -= output.request_finished
            self.meter(len(output.token_ids))
        return [PromptOutput(index, output) for output in item]

    async def _pump(
        self, index: int, request: GenerateRequest, arrivals: asyncio.Queue[_Arrival]
    ) -> None:
        """Move one stream's items to the queue, which is bounded by the request's own tokens."""
        # Backends generate with async generators: closing one is how a request is aborted.
        stream = cast("AsyncGenerator[GenerationItem, None]", self._backend.generate(request))
        is_finished = False
        error: Exception = ClusterError("the replica ended the stream too early")
        try:
            async with aclosing(stream):
                async for item in stream:
                    arrivals.put_nowait((index, item))
                    is_finished = isinstance(item, list) and item[-1].request_finished
        except Exception as caught:  # noqa: BLE001 -- it is raised where the queue is read
            is_finished, error = False, caught
        finally:
            # On every way out, a cancellation included: the reader must not wait for ever.
            if not is_finished:
                arrivals.put_nowait((index, _Failed(error)))
