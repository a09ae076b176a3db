"""Follows one request through a replica and counts what came of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.metrics.adapter_labels import OTHER
from engine.outputs import RequestOutput

if TYPE_CHECKING:
    from deployments.metrics.replica_metrics import ReplicaMetrics


class RequestRecord:
    """One request's times and tokens."""

    def __init__(self, metrics: "ReplicaMetrics") -> None:
        self._metrics = metrics
        self._adapter: str | None = None
        self._arrived = metrics.now()
        self._first: float | None = None
        self._last = self._arrived
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._num_sequences = 1
        self._is_admitted = False
        self._is_over = False

    def admitted(self, adapter: str | None, generation: int = 0) -> None:
        """The request may start, on this adapter, None for the base model.

        Of generations there are too many for labels.
        """
        self._is_admitted = True
        self._adapter = adapter
        self._metrics.admission.observe(self._metrics.now() - self._arrived)

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The prompt has so many tokens."""
        self._num_prompt_tokens = num_prompt_tokens

    def outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Tokens arrived, perhaps of several sequences."""
        now = self._metrics.now()
        num_tokens = sum(len(output.token_ids) for output in outputs)
        if num_tokens:
            self._count_tokens(now, num_tokens, len({output.index for output in outputs}))
        for output in outputs:
            if output.finish_reason is not None:
                self._metrics.ended(output.finish_reason)
        if outputs and outputs[-1].request_finished:
            reason = outputs[-1].finish_reason
            self._finish(now, is_failed=reason is not None and reason in ("abort", "error"))

    def end(self, reason: str) -> None:
        """The request is over; does nothing if its last output said so already."""
        if not self._is_over:
            self._metrics.ended(reason)
            self._finish(self._metrics.now(), is_failed=True)

    def _count_tokens(self, now: float, num_tokens: int, num_sequences: int) -> None:
        if self._first is None:
            self._first = now
            self._num_sequences = num_sequences
            self._metrics.first_token.observe(now - self._arrived)
        else:
            # Sequences run side by side: each waited for its share of the tokens alone.
            waited = (now - self._last) * num_sequences / num_tokens
            self._metrics.between_tokens.observe(waited, num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def _finish(self, now: float, *, is_failed: bool) -> None:
        self._is_over = True
        metrics = self._metrics
        # Names that nobody serves must not use up the labels.
        label = OTHER
        if self._is_admitted:
            label = metrics.labels.label(self._adapter or metrics.base_model)
        place = (metrics.replica_id, label)
        metrics.adapter_requests.labels(*place).inc()
        # Made for every adapter, so that all its series end together.
        metrics.adapter_failures.labels(*place).inc(is_failed)
        metrics.adapter_tokens.labels(*place).inc(self._num_tokens)
        adapter_seconds = metrics.adapter_seconds.labels(*place)
        adapter_first_token = metrics.adapter_first_token.labels(*place)
        if self._first is not None:
            adapter_first_token.observe(self._first - self._arrived)
        if is_failed:
            return
        adapter_seconds.observe(now - self._arrived)
        metrics.whole_request.observe(now - self._arrived)
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        self._observe_decode()

    def _observe_decode(self) -> None:
        if self._first is None:
            return
        seconds = self._last - self._first
        self._metrics.decode.observe(seconds)
        after_first = self._num_tokens / self._num_sequences - 1
        if after_first > 0:
            self._metrics.per_output_token.observe(seconds / after_first)
