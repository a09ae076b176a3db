"""Follows one request through a replica: spans for its stages, and a line when it is over.

Stands in for the ``RequestRecord`` of the metrics, which it tells everything that it is told.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from deployments.generation import GenerateRequest
from engine.outputs import FinishReason, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from deployments.telemetry.request_spans import RequestSpans

logger = logging.getLogger(__name__)


class RequestObserver(Protocol):
    """Is told how far a request has come."""

    def admitted(self, adapter: str | None, generation: int = 0) -> None:
        """The request may start, on this adapter, None for the base model."""

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The prompt has so many tokens."""

    def outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Tokens arrived, perhaps of several sequences."""


class RequestTelemetry:
    """Follows the requests of one replica. ``tracer`` None makes no spans."""

    def __init__(self, replica_id: str, base_model: str, tracer: "Tracer | None") -> None:
        self._replica_id = replica_id
        self._base_model = base_model
        self._tracer = tracer

    @contextmanager
    def follow(
        self, request: GenerateRequest, record: RequestObserver
    ) -> Iterator["FollowedRequest"]:
        """Follow one request until the block ends, whichever way."""
        subject: dict[str, str | int] = {
            "request_id": request.origin.request_id or request.request_id,
            "completion_id": request.request_id,
            "adapter": request.adapter or self._base_model,
            "generation": 0,
            "replica": self._replica_id,
        }
        followed = FollowedRequest(subject, record, self._spans(request))
        error: BaseException | None = None
        try:
            yield followed
        except BaseException as caught:
            error = caught
            raise
        finally:
            followed.end(error)

    def _spans(self, request: GenerateRequest) -> "RequestSpans | None":
        if self._tracer is None:
            return None
        from deployments.telemetry.request_spans import RequestSpans

        return RequestSpans(self._tracer, request.origin)


class FollowedRequest:
    """One request's story. ``subject`` says which request, on which adapter."""

    def __init__(
        self,
        subject: dict[str, str | int],
        record: RequestObserver,
        spans: "RequestSpans | None",
    ) -> None:
        self._subject = subject
        self._record = record
        self._spans = spans
        self._began = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._reason: FinishReason | None = None
        self._is_finished = False

    def admitted(self, adapter: str | None, generation: int = 0) -> None:
        """The request may start; an alias has become an adapter."""
        self._record.admitted(adapter, generation)
        if adapter is not None:
            self._subject |= {"adapter": adapter, "generation": generation}
        if self._spans is not None:
            self._spans.resolved(self._subject)

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The prompt has so many tokens."""
        self._record.tokenized(num_prompt_tokens)
        self._num_prompt_tokens = num_prompt_tokens
        if self._spans is not None:
            self._spans.tokenized(self._subject)

    def outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Tokens arrived."""
        self._record.outputs(outputs)
        for output in outputs:
            self._num_output_tokens += len(output.token_ids)
            self._reason = output.finish_reason or self._reason
            self._is_finished |= output.request_finished
            if output.timing is not None and self._spans is not None:
                self._spans.started(output.timing, self._subject)

    def end(self, error: BaseException | None) -> None:
        """The request is over. What comes after its last output is no failure."""
        if self._is_finished:
            error = None
        story: dict[str, str | int] = {
            **self._subject,
            "finish_reason": self._end_reason(error),
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_output_tokens": self._num_output_tokens,
        }
        if self._spans is not None:
            self._spans.end(story, error)
        if logger.isEnabledFor(logging.INFO):
            seconds = round(time.monotonic() - self._began, 4)
            why = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
            logger.info("request ended", extra={**story, "seconds": seconds, **why})

    def _end_reason(self, error: BaseException | None) -> str:
        if self._is_finished and self._reason is not None:
            return self._reason
        return FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT
