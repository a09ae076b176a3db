"""Where spans are made and sent. Imports OpenTelemetry only when asked to make some.

Knows how processes tell each other of spans. What spans are about is known by ``http_telemetry``
and ``request_spans``.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deployments.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

INSTRUMENTATION = "lorafleet"
_EXTRA = "traces need the packages of the extra: pip install 'lorafleet[traces]'"


class MissingPackageError(RuntimeError):
    """Traces were asked for where OpenTelemetry is not installed."""


def make_tracer(settings: TelemetrySettings, component: str) -> "Tracer | None":
    """A tracer that sends to the configured collector, in the background; None if there is none.

    ``component`` tells apart the processes of one service.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise MissingPackageError(_EXTRA) from error
    ours = Resource.create({"service.name": INSTRUMENTATION, "service.instance.id": component})
    provider = TracerProvider(
        # What the environment says goes before.
        resource=ours.merge(OTELResourceDetector().detect()),
        sampler=ParentBasedTraceIdRatio(settings.sample_ratio),
    )
    exporter = OTLPSpanExporter(endpoint=settings.otlp_traces_endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer(INSTRUMENTATION)


def carrier_of(span: "Span") -> dict[str, str]:
    """A span in the form of W3C's headers."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier


def start_span(
    tracer: "Tracer", name: str, carrier: Mapping[str, str], *, is_server: bool = False
) -> "Span":
    """Start a span below what W3C's headers name, or at the top if they name nothing."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(carrier, Context())
    kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
    return tracer.start_span(name, parent, kind)


def add_span(
    tracer: "Tracer",
    name: str,
    parent: "Span",
    *,
    begin_s: float,
    end_s: float,
    attributes: Mapping[str, str | int],
) -> None:
    """Record what happened between two moments of the monotonic clock."""
    from opentelemetry.trace import set_span_in_context

    offset_ns = time.time_ns() - time.monotonic_ns()
    begin_ns, end_ns = (offset_ns + int(moment * 1e9) for moment in (begin_s, end_s))
    span = tracer.start_span(
        name, set_span_in_context(parent), attributes=attributes, start_time=begin_ns
    )
    span.end(end_ns)


def set_failed(span: "Span", error: BaseException) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
