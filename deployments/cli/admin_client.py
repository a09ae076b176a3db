"""A client of a running deployment's routes for operators.

Every change carries an operation id, so it may be sent again when its answer was lost: the server
does it once. Knows HTTP; knows nothing of terminals.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

Json = dict[str, Any]

_CONNECT_TIMEOUT_S = 10.0
_PAGE = 1000
# Waits before a change is sent again whose answer was lost.
_REPEAT_DELAYS_S = (0.5, 2.0, 5.0)


class RefusedError(Exception):
    """The server understood and said no."""


class NoAnswerError(Exception):
    """No connection, no answer, or a server error."""


class LostAnswerError(NoAnswerError):
    """The request was sent, and nobody can tell whether anything happened."""


class AdminClient:
    """Calls one deployment. ``timeout_s`` is how long an answer may take."""

    def __init__(self, url: str, key: str | None, *, timeout_s: float = 200.0) -> None:
        headers = {} if not key else {"authorization": f"Bearer {key}"}
        self._url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
        )

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Json:
        """Read one document."""
        with self._failures():
            return _document(self._http.get(path, params=dict(params or {})))

    def pages(self, path: str, params: Mapping[str, Any], limit: int | None) -> Json:
        """Read a list by names to its end, or to ``limit`` entries."""
        found: Json = {"object": "list", "data": [], "has_more": True}
        after = ""
        while found["has_more"] and (limit is None or len(found["data"]) < limit):
            rest = _PAGE if limit is None else min(_PAGE, limit - len(found["data"]))
            page = self.get(path, {**params, "after": after, "limit": rest})
            found = {**page, "data": found["data"] + page["data"]}
            after = found["data"][-1]["name"] if found["data"] else ""
        return found

    def change(
        self,
        method: str,
        path: str,
        *,
        op_id: str,
        body: Json | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Json:
        """Change something, once, however often it must be said."""
        for delay_s in (*_REPEAT_DELAYS_S, None):
            try:
                return self._send(
                    method, path, op_id=op_id, json=body, params=_without_none(params)
                )
            except LostAnswerError:
                if delay_s is None:
                    raise
                time.sleep(delay_s)
        raise AssertionError("unreachable")

    def push(self, path: str, *, op_id: str, files: Mapping[str, Any], pin: bool) -> Json:
        """Send an adapter's files. Once: their readers are at their ends afterwards."""
        return self._send("PUT", path, op_id=op_id, files=files, params={"pin": pin})

    def find_operation(self, op_id: str) -> Json | None:
        """What became of an operation, None while the server knows nothing of it."""
        try:
            return self.get(f"/v1/adapters/operations/{op_id}")
        except (RefusedError, NoAnswerError):
            return None

    def _send(self, method: str, path: str, *, op_id: str, **what: Any) -> Json:
        headers = {"idempotency-key": op_id}
        with self._failures():
            return _document(self._http.request(method, path, headers=headers, **what))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            is_unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            kind = NoAnswerError if is_unsent else LostAnswerError
            raise kind(f"no answer from {self._url}: {error or type(error).__name__}") from error
        except httpx.InvalidURL as error:
            raise NoAnswerError(f"{self._url} is not a URL: {error}") from error


def new_operation_id() -> str:
    """An id that no other operation has."""
    return uuid.uuid4().hex


def adapter_path(name: str, action: str = "") -> str:
    """The route of one adapter."""
    return f"/v1/adapters/{quote(name, safe='/')}{action and '/' + action}"


def alias_path(name: str) -> str:
    """The route of one alias."""
    return f"/v1/adapters/aliases/{quote(name, safe='/')}"


def _document(response: httpx.Response) -> Json:
    if response.is_success:
        try:
            document: Json = response.json()
        except ValueError as error:
            raise NoAnswerError(f"{response.url} answered something else than JSON") from error
        return document
    message = f"{response.status_code}: {_message(response)}"
    if response.is_server_error:
        raise NoAnswerError(message)
    raise RefusedError(message)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500] or response.reason_phrase


def _without_none(params: Mapping[str, Any] | None) -> Json:
    return {name: value for name, value in (params or {}).items() if value is not None}
