"""The outermost layer: every request gets an id, every crash an answer, every answer is counted."""

import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.failures import describe_failure
from deployments.openai.metrics import HttpMetrics
from deployments.telemetry.http_telemetry import HttpTelemetry

REQUEST_ID_HEADER = "x-request-id"

_log = logging.getLogger(__name__)

# A client's id goes to headers and logs, so only harmless ones are kept.
_SANE_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}", re.ASCII)


class RequestScope:
    """ASGI middleware around the whole app. Pure ASGI, so that streams pass untouched.

    ``sends_request_id`` is off behind a proxy that adds the header to responses by itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        telemetry: HttpTelemetry,
        *,
        sends_request_id: bool,
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._metrics = metrics
        self._sends_request_id = sends_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._sends_request_id:
                    MutableHeaders(raw=message["headers"])[REQUEST_ID_HEADER] = request_id
            await send(message)

        began = time.monotonic()
        with self._telemetry.follow(scope, request_id) as exchange:
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                failure = describe_failure(error, request_id)
                if status is not None:
                    # The status line is gone. Ending abruptly is the only way left to say so.
                    raise
                await failure.response()(scope, receive, send_with_id)
            finally:
                exchange.route, exchange.status = _route(scope), status
                exchange.seconds = time.monotonic() - began
                self._metrics.count(exchange.route, status, exchange.seconds)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if _SANE_ID.fullmatch(given) else secrets.token_hex(16)


def _route(scope: MutableMapping[str, Any]) -> str:
    """The route's template: paths themselves would make a metric for each."""
    return str(getattr(scope.get("route"), "path", "other"))
