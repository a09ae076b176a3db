"""Follows one HTTP request through an ingress: its span, its log line, its id everywhere."""

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from deployments.telemetry.request_origin import RequestOrigin, origin

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

# Asked by machines every few seconds, or open for hours.
_QUIET = frozenset({"/health", "/metrics", "/admin/events"})
_NO_STATUS = 0
_FIRST_SERVER_ERROR = 500

Scope = MutableMapping[str, Any]


@dataclass(slots=True, kw_only=True)
class HttpExchange:
    """One request and what became of it, as far as it is known."""

    method: str
    route: str = ""
    status: int | None = None
    seconds: float = 0.0


class HttpTelemetry:
    """Follows the requests of one app. ``tracer`` None makes no spans."""

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self._tracer = tracer

    @contextmanager
    def follow(self, scope: Scope, request_id: str) -> Iterator[HttpExchange]:
        """Run a block on behalf of a request; the block fills in what became of it."""
        exchange = HttpExchange(method=scope["method"])
        is_quiet = scope["path"] in _QUIET
        span = None if is_quiet else self._start(scope, request_id)
        try:
            with origin(self._origin(request_id, span)):
                yield exchange
                if not is_quiet and logger.isEnabledFor(logging.INFO):
                    _log(exchange, request_id)
        finally:
            if span is not None:
                _end(span, exchange)

    def _start(self, scope: Scope, request_id: str) -> "Span | None":
        if self._tracer is None:
            return None
        from deployments.telemetry.tracing import start_span

        headers = Headers(scope=scope)
        carrier = {name: headers.get(name, "") for name in ("traceparent", "tracestate")}
        span = start_span(self._tracer, scope["method"], carrier, is_server=True)
        span.set_attribute("http.request.method", scope["method"])
        span.set_attribute("lorafleet.request_id", request_id)
        return span

    @staticmethod
    def _origin(request_id: str, span: "Span | None") -> RequestOrigin:
        if span is None:
            return RequestOrigin(request_id=request_id)
        from deployments.telemetry.tracing import carrier_of

        return RequestOrigin(request_id=request_id, **carrier_of(span))


def _log(exchange: HttpExchange, request_id: str) -> None:
    extra = {
        "request_id": request_id,
        "method": exchange.method,
        "route": exchange.route,
        "status": exchange.status or _NO_STATUS,
        "seconds": round(exchange.seconds, 4),
    }
    logger.info("http request", extra=extra)


def _end(span: "Span", exchange: HttpExchange) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.update_name(f"{exchange.method} {exchange.route}")
    span.set_attribute("http.route", exchange.route)
    status = exchange.status or _NO_STATUS
    span.set_attribute("http.response.status_code", status)
    if status == _NO_STATUS or status >= _FIRST_SERVER_ERROR:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
