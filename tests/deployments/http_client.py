"""Ways to call the HTTP app in tests: in process, or over a real socket."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from deployments.http_app import create_http_app
from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend

Json = dict[str, Any]


class Client(httpx.AsyncClient):
    """Calls an app in its own process and event loop."""

    def __init__(self, backend: FakeBackend, settings: HttpSettings | None = None) -> None:
        app = create_http_app(backend, settings)
        super().__init__(transport=httpx.ASGITransport(app=app), base_url="http://test")

    async def events(self, path: str, body: Json) -> list[Json]:
        """Post a streaming request and return its events; it must end properly."""
        response = await self.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        frames = response.text.split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        assert all(frame.startswith("data: ") for frame in frames[:-1])
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def assert_error(response: httpx.Response, status: int, param: str | None) -> Json:
    """Check OpenAI's envelope and return the error."""
    assert response.status_code == status, response.text
    document = response.json()
    assert document.keys() == {"error"}
    error: Json = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    return error


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve an app on a free port of this machine from a thread; yields its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive(), "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
