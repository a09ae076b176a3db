"""Every failure as OpenAI's error envelope.

Knows how an exception looks on the wire; which status a cluster or engine error has is decided by
``deployments.error_table`` alone. Nothing leaves this surface in another shape: not a routing
error, not a crash.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from adapters import InvalidAdapterNameError
from deployments.error_table import error_status
from deployments.errors import ClusterError
from engine.errors import EngineError

_log = logging.getLogger(__name__)

BAD_REQUEST = "BadRequestError"
INVALID_USER_INPUT = "InvalidUserInput"
NOT_FOUND = "NotFoundError"

# Names the operation that a request started, also when the request failed.
OPERATION_HEADER = "x-lorafleet-operation"

_MAX_MESSAGE_CHARS = 2000
_MAX_LOGGED_PATH = 256
_MAX_LISTED_ERRORS = 5
_HTTP_TYPES = {404: NOT_FOUND, 405: "MethodNotAllowedError"}


class ApiError(Exception):
    """A failure that only the HTTP surface can have: authentication, body, routing."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = BAD_REQUEST,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.headers = dict(headers or {})
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Failure:
    """What an exception becomes on the wire. ``reason`` is why it is counted as a refusal."""

    status: int
    message: str
    type: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reason: str | None = None

    def body(self) -> bytes:
        """The JSON envelope, also used as an event in the middle of a stream."""
        error = {
            "message": _valid_text(self.message),
            "type": self.type,
            "param": None if self.param is None else _valid_text(self.param),
            "code": self.status,
        }
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def describe_failure(error: BaseException, request_id: str) -> Failure:
    """Translate an exception; log it if nobody raised it on purpose."""
    if isinstance(error, ApiError):
        return Failure(
            error.status, error.message, error.type, error.param, error.headers, error.reason
        )
    if isinstance(error, ValidationError):
        return _describe_validation(error)
    if isinstance(error, HTTPException):
        return _describe_http_exception(error)
    status = error_status(error)
    headers = dict(getattr(error, "headers", {}))
    if status.status == HTTPStatus.REQUEST_TIMEOUT:
        # OpenAI's clients would send it again by themselves.
        headers["x-should-retry"] = "false"
    if status.retry_after_s is not None:
        headers["retry-after"] = str(status.retry_after_s)
    if isinstance(error, (ClusterError, EngineError, InvalidAdapterNameError)):
        if status.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.warning("request %s failed: %s", request_id, error)
        reason = getattr(error, "limit", status.reason)
        return Failure(status.status, str(error), status.type, status.param, headers, reason)
    _log.error("request %s crashed", request_id, exc_info=error)
    message = f"Internal server error. Quote request id {request_id} when you report it."
    return Failure(status.status, message, status.type, None, headers)


def install_failure_handlers(app: FastAPI, count_refusal: Callable[[str], None]) -> None:
    """Send every exception of a route through ``describe_failure``; count refusals by reason."""

    async def handle(request: Request, error: Exception) -> Response:
        failure = describe_failure(error, request.scope["state"]["request_id"])
        if failure.reason is not None:
            count_refusal(failure.reason)
        if getattr(request.state, "is_audited", False):
            _log_refusal(request, failure)
        operation_id = getattr(request.state, "operation_id", None)
        if operation_id is not None:
            failure.headers[OPERATION_HEADER] = operation_id
        return failure.response()

    for kind in (
        ApiError,
        ValidationError,
        HTTPException,
        ClusterError,
        EngineError,
        InvalidAdapterNameError,
    ):
        app.add_exception_handler(kind, handle)


def _log_refusal(request: Request, failure: Failure) -> None:
    peer = request.client.host if request.client else "?"
    visit = getattr(request.state, "visit", None)
    caller = "anonymous" if visit is None else visit.holder.name
    route = f"{request.method} {request.url.path[:_MAX_LOGGED_PATH]}"
    message = _valid_text(failure.message)
    # As a Python literal, so that nothing in it can look like another line of the log.
    _log.warning("refused %r of %s from %s: %d %r", route, caller, peer, failure.status, message)


def _describe_validation(error: ValidationError) -> Failure:
    """Name each offending field as ``body.field``; values are not echoed, they may be huge."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    lines = [f"{_location(item['loc'])}: {item['msg']}" for item in details[:_MAX_LISTED_ERRORS]]
    if len(details) > _MAX_LISTED_ERRORS:
        lines.append(f"and {len(details) - _MAX_LISTED_ERRORS} more")
    noun = "error" if len(details) == 1 else "errors"
    message = f"{len(details)} validation {noun}: " + "; ".join(lines)
    return Failure(400, message, BAD_REQUEST, _location(details[0]["loc"]))


def _location(loc: tuple[int | str, ...]) -> str:
    return ".".join(("body", *(str(part)[:64] for part in loc)))


def _describe_http_exception(error: HTTPException) -> Failure:
    kind = _HTTP_TYPES.get(error.status_code, BAD_REQUEST)
    headers = dict(error.headers or {})
    return Failure(error.status_code, str(error.detail), kind, None, headers)


def _valid_text(text: str) -> str:
    """Bound a message and drop what UTF-8 cannot carry, since part of it may come from outside."""
    if len(text) > _MAX_MESSAGE_CHARS:
        text = text[:_MAX_MESSAGE_CHARS] + "..."
    return text.encode(errors="replace").decode()
