"""The routes of the page. Its files are open to all, since they say nothing; the stream is not."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Depends, Request, Response

from deployments.admin_page.feed import FleetFeed
from deployments.openai.api import Api
from deployments.openai.auth import admin_guard
from deployments.openai.failures import NOT_FOUND, ApiError
from deployments.openai.sse import EventStream

_STATIC = Path(__file__).resolve().parent / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but this origin's own files, and no page of another may show it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked about each time, answered without a body while nothing changed.
    "cache-control": "no-cache",
}


def admin_page_router(api: Api, feed: FleetFeed | None = None) -> APIRouter:
    """The page, its files, and its stream."""
    router = APIRouter()
    files = _read_files()
    followed = feed or FleetFeed(api.backend)

    @router.get("/admin")
    async def page(request: Request) -> Response:
        return answer(request, "index.html")

    @router.get("/admin/events", dependencies=[Depends(admin_guard(api))])
    async def events() -> Response:
        stream = followed.events((await api.base_model()).id)

        async def close() -> None:
            await stream.aclose()

        return EventStream(_encoded(stream), close, headers={})

    @router.get("/admin/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise ApiError("There is no such file.", status=404, type=NOT_FOUND)
        return answer(request, name)

    def answer(request: Request, name: str) -> Response:
        content, tag = files[name]
        headers = {**_HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[Path(name).suffix])

    return router


async def _encoded(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for event in events:
        yield b"data: " + event + b"\n\n"


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Every file with its entity tag."""
    found = {}
    for path in _STATIC.iterdir():
        content = path.read_bytes()
        found[path.name] = content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return found
