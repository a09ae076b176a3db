"""Runs one generation request from its admission to its response, whole or streamed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, Protocol, overload

import orjson
from fastapi import Request, Response

from deployments.generation import GenerationStart
from deployments.openai.disconnect import ClientGoneError, until_disconnect
from deployments.openai.fanout import Fanout
from deployments.openai.sse import EventStream
from deployments.openai.visit import expected_tokens, visit_of
from engine.errors import DeadlineExceededError

REPLICA_HEADER = "x-lorafleet-replica"
GENERATION_HEADER = "x-lorafleet-adapter-generation"

# Nobody reads this status; it is the customary one in access logs.
_CLIENT_CLOSED_REQUEST = 499


class DocumentWriter(Protocol):
    """Turns outputs into one API's response."""

    async def document(self) -> dict[str, Any]:
        """The whole response."""


class Writer(DocumentWriter, Protocol):
    """The same for an API that streams as well."""

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, ready to send."""


@overload
async def respond(
    request: Request,
    fanout: Fanout,
    make_writer: Callable[[Fanout], Awaitable[DocumentWriter]],
    *,
    stream: Literal[False],
) -> Response: ...


@overload
async def respond(
    request: Request,
    fanout: Fanout,
    make_writer: Callable[[Fanout], Awaitable[Writer]],
    *,
    stream: bool,
) -> Response: ...


async def respond(
    request: Request,
    fanout: Fanout,
    make_writer: Callable[[Fanout], Awaitable[Any]],
    *,
    stream: bool,
) -> Response:
    """Admit and start the requests, then stream or wait. They end with the client, at any moment.

    Their place under the caller's limits is given back on every way out.
    """
    visit = visit_of(request)
    async with AsyncExitStack() as stack:
        asked = fanout.requests
        ticket = await visit.admit(asked[0].adapter, expected_tokens(asked))
        stack.callback(ticket.close)
        fanout.meter = ticket.spend
        fanout.serve_for(visit.holder.name)
        stack.push_async_callback(fanout.aclose)

        async def work() -> Writer | bytes:
            # The engine keeps to the time as well; this is for whatever holds a request up before.
            async with time_limit(asked[0].timeout_s):
                await fanout.start()
                writer = await make_writer(fanout)
                return writer if stream else orjson.dumps(await writer.document())

        try:
            result = await until_disconnect(request.receive, work())
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        headers = {**_headers(fanout.starts), **visit.headers}
        if isinstance(result, bytes):
            return Response(result, headers=headers, media_type="application/json")
        # From here on the stream owns what was taken; nothing waits before it is sent.
        return EventStream(result.events(), stack.pop_all().aclose, headers=headers)


@asynccontextmanager
async def time_limit(timeout_s: float | None) -> AsyncIterator[None]:
    """Raise DeadlineExceededError in what takes longer."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceededError(
            f"the request was not finished within its timeout of {timeout_s} s"
        ) from None


def _headers(starts: Sequence[GenerationStart]) -> dict[str, str]:
    replicas = dict.fromkeys(start.replica_id for start in starts)
    return {REPLICA_HEADER: ",".join(replicas), GENERATION_HEADER: str(starts[0].generation)}
