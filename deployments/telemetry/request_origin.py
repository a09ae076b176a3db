"""The HTTP request in whose context something runs, known everywhere without being handed around.

Plain data that travels to replicas with the requests made from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrigin:
    """An HTTP request's id, and its span in the form that other processes continue (W3C)."""

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""


_NOBODY = RequestOrigin()
_current: ContextVar[RequestOrigin] = ContextVar("request_origin", default=_NOBODY)


def current_origin() -> RequestOrigin:
    """The origin of what runs now; an empty one outside of requests."""
    return _current.get()


def enter_origin(origin: RequestOrigin) -> None:
    """Let the rest of this context run on behalf of a request."""
    _current.set(origin)


@contextmanager
def origin(origin: RequestOrigin) -> Iterator[None]:
    """Let a block run on behalf of a request."""
    token = _current.set(origin)
    try:
        yield
    finally:
        _current.reset(token)
