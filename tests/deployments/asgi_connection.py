"""One ASGI request whose client can leave at a chosen moment."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI

from tests.deployments.http_client import Json

COMPLETIONS = "/v1/completions"


class Connection:
    """A client of completions; a ``broken`` one is gone when the body is sent.

    One that takes ``pause_s`` for each message holds the server up meanwhile, as full sockets do.
    """

    def __init__(
        self,
        app: FastAPI,
        body: Json,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        broken: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()
        self._broken = broken
        self._pause_s = pause_s
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._broken and message["type"] == "http.response.body":
            raise OSError("connection reset")
        if self._pause_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), self._pause_s)
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        """What has come so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    def leave(self) -> None:
        self._left.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- the conditions are plain facts of a fake
            await asyncio.sleep(0)
