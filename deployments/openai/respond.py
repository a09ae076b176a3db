"""Runs one generation request from its admission to its response, whole or streamed."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

import orjson
from fastapi import Request, Response

from deployments.generation import GenerationStart
from deployments.openai.disconnect import ClientGoneError, until_disconnect
from deployments.openai.fanout import Fanout
from deployments.openai.sse import EventStream

REPLICA_HEADER = "x-lorafleet-replica"
GENERATION_HEADER = "x-lorafleet-adapter-generation"

# Nobody reads this status; it is the customary one in access logs.
_CLIENT_CLOSED_REQUEST = 499


class Writer(Protocol):
    """Turns outputs into one API's response."""

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, ready to send."""

    async def document(self) -> dict[str, Any]:
        """The whole response."""


async def respond(
    request: Request,
    fanout: Fanout,
    make_writer: Callable[[Fanout], Awaitable[Writer]],
    *,
    stream: bool,
) -> Response:
    """Start the requests, then stream or wait. They end with the client, at any moment."""

    async def work() -> Response:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(fanout.aclose)
            await fanout.start()
            headers = _headers(fanout.starts)
            writer = await make_writer(fanout)
            if stream:
                stack.pop_all()
                return EventStream(writer.events(), fanout.aclose, headers=headers)
            body = orjson.dumps(await writer.document())
            return Response(body, headers=headers, media_type="application/json")

    try:
        return await until_disconnect(request.receive, work())
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _headers(starts: Sequence[GenerationStart]) -> dict[str, str]:
    replicas = dict.fromkeys(start.replica_id for start in starts)
    return {REPLICA_HEADER: ",".join(replicas), GENERATION_HEADER: str(starts[0].generation)}
