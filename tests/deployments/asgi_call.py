"""One whole HTTP request to an app in this process, byte for byte as a hostile client sends it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI

_TIMEOUT_S = 60.0
JSON_TYPE = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and whole body."""

    status: int
    body: bytes


async def call(
    app: FastAPI,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    headers: Sequence[tuple[bytes, bytes]] = (JSON_TYPE,),
) -> Answer:
    """Send one request, whose client stays to the end; a server that hangs fails."""
    raw_path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "path": unquote_to_bytes(raw_path).decode("utf-8", errors="replace"),
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(b"host", b"test"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
        "state": {},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []
    answered = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    async with asyncio.timeout(_TIMEOUT_S):
        await app(scope, receive, send)
    return Answer(sent[0]["status"], b"".join(message.get("body", b"") for message in sent))
