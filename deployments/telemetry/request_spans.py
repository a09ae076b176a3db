"""The spans of one request on its replica: ``generate``, and below it one for each stage.

Stages whose times the engine knows are recorded when they are over, so that the spans of a batch's
requests cost its steps nothing. Imported only where spans are made.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deployments.telemetry.request_origin import RequestOrigin
from deployments.telemetry.tracing import add_span, set_failed, start_span
from engine.outputs import RequestTiming

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Attributes = Mapping[str, str | int]

# OpenTelemetry's names where it has them.
_NAMES = {
    "completion_id": "gen_ai.response.id",
    "num_prompt_tokens": "gen_ai.usage.input_tokens",
    "num_output_tokens": "gen_ai.usage.output_tokens",
}


class RequestSpans:
    """``resolve``, ``tokenize``, ``queue``, ``prefill`` and ``decode`` follow each other."""

    def __init__(self, tracer: "Tracer", origin: RequestOrigin) -> None:
        carrier = {"traceparent": origin.traceparent, "tracestate": origin.tracestate}
        self._tracer = tracer
        self._span = start_span(tracer, "generate", carrier)
        self._stage = "resolve"
        self._began = time.monotonic()

    def resolved(self, subject: Attributes) -> None:
        """The adapter was found and loaded."""
        self._next("tokenize", time.monotonic(), subject)

    def tokenized(self, subject: Attributes) -> None:
        """The prompt was rendered and tokenised."""
        self._next("queue", time.monotonic(), subject)

    def started(self, timing: RequestTiming, subject: Attributes) -> None:
        """A sequence has its first token; of several, the first one counts."""
        if self._stage == "queue":
            self._began = timing.arrival_s
            self._next("prefill", timing.scheduled_s, subject)
            self._next("decode", timing.first_token_s, subject)

    def end(self, attributes: Attributes, error: BaseException | None) -> None:
        """The last token came, or none will."""
        self._next("", time.monotonic(), attributes)
        self._span.set_attributes(_named(attributes))
        if error is not None:
            set_failed(self._span, error)
        self._span.end()

    def _next(self, stage: str, now: float, attributes: Attributes) -> None:
        """One stage is over, the next one begins."""
        add_span(
            self._tracer,
            self._stage,
            self._span,
            begin_s=self._began,
            end_s=now,
            attributes=_named(attributes),
        )
        self._stage, self._began = stage, now


def _named(attributes: Attributes) -> dict[str, str | int]:
    return {_NAMES.get(name, f"lorafleet.{name}"): value for name, value in attributes.items()}
