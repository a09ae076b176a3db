"""A response of server-sent events that stops working when its reader leaves."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.openai.disconnect import ClientGoneError, until_disconnect
from deployments.openai.failures import describe_failure

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends ready-made events; ``close`` runs on every way out.

    An error in the middle becomes an event with the error's envelope, then the stream ends as
    usual, because the status line is long gone.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        # Proxies must neither gather nor change a stream of events.
        quiet = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self.init_headers({**quiet, **headers, "content-type": CONTENT_TYPE})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        try:
            await until_disconnect(receive, self._send_all(send, request_id))
        except (ClientGoneError, OSError):
            _log.info("request %s: the client left its stream", request_id)
        finally:
            await self._close()

    async def _send_all(self, send: Send, request_id: str) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 -- described, logged and sent
            body = describe_failure(error, request_id).body()
            event = b"data: " + body + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
