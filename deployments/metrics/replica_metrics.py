"""The metrics of one replica: its engine, its requests, its adapters.

A metric whose meaning is the same as in vLLM has vLLM's name, so that dashboards made for it work;
its label ``engine`` is the replica's id. All others are called ``lorafleet_``. What is told of
single adapters is bounded by ``AdapterLabels``. A list of tokens costs some microseconds, a token
nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from deployments.metrics import buckets
from deployments.metrics.adapter_labels import AdapterLabels
from deployments.metrics.request_record import RequestRecord
from deployments.metrics.snapshot import take_snapshot
from deployments.metrics.token_histogram import TokenHistogram

_VLLM_LABELS = ("model_name", "engine")
# Renewals may come in quick succession; what they carry need not be newer than this.
_MAX_AGE_S = 1.0


class ReplicaMetrics:
    """Counts what one replica does. ``base_model`` is its public name."""

    def __init__(
        self,
        base_model: str,
        replica_id: str,
        max_model_len: int,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base_model = base_model
        self.replica_id = replica_id
        self.now = now
        self.registry = CollectorRegistry()
        self.labels = AdapterLabels(self._forget, now=now)
        self._define_requests(max_model_len)
        self._define_adapters()
        self._snapshot: tuple[float, bytes] | None = None

    @contextmanager
    def request(self) -> Iterator[RequestRecord]:
        """Record one request, from its arrival to its end, whichever that is."""
        record = RequestRecord(self)
        try:
            yield record
        except Exception:
            record.end("error")
            raise
        finally:
            record.end("abort")

    def observe_load(self, seconds: float, *, failed: bool) -> None:
        """An adapter that was not in memory was fetched and given to the engine."""
        self.cold_loads.labels(self.replica_id, "failed" if failed else "loaded").observe(seconds)

    def observe_resolver(self, backend: str, outcome: str, seconds: float) -> None:
        """A resolver was asked, or a source fetched from; called from any thread."""
        self.resolver_seconds.labels(self.replica_id, backend, outcome).observe(seconds)

    def snapshot(self) -> bytes:
        """Everything as bytes, at most a second old."""
        now = self.now()
        if self._snapshot is None or now - self._snapshot[0] >= _MAX_AGE_S:
            self._snapshot = now, take_snapshot(self.registry)
        return self._snapshot[1]

    # -- definitions

    def _define_requests(self, max_model_len: int) -> None:
        labels = dict(zip(_VLLM_LABELS, (self.base_model, self.replica_id), strict=True))
        counts = buckets.token_counts(max_model_len)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"vllm:{name}", text, _VLLM_LABELS, buckets=bounds, registry=self.registry
            ).labels(*labels.values())

        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival at its replica to its first token",
            buckets.FIRST_TOKEN_S,
        )
        self.per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "A request's time for each token after its first",
            buckets.TOKEN_S,
        )
        self.whole_request = histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival at its replica to its end",
            buckets.REQUEST_S,
        )
        self.decode = histogram(
            "request_decode_time_seconds",
            "Time from a request's first token to its last",
            buckets.REQUEST_S,
        )
        self.prompt_tokens = histogram(
            "request_prompt_tokens", "Tokens of a request's prompt", counts
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens that a request was given", counts
        )
        self.between_tokens = TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between a request's tokens, from one list of them to the next",
            labels,
            buckets.TOKEN_S,
            self.registry,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Sequences that ended, by the reason why",
            (*_VLLM_LABELS, "finished_reason"),
            registry=self.registry,
        )

    def ended(self, reason: str) -> None:
        """A sequence ended for this reason."""
        self._ended.labels(self.base_model, self.replica_id, reason).inc()

    def _define_adapters(self) -> None:
        labels = ("replica", "adapter")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"lorafleet_adapter_{name}", text, labels, registry=self.registry)

        def summary(name: str, text: str) -> Summary:
            return Summary(f"lorafleet_adapter_{name}", text, labels, registry=self.registry)

        self.adapter_requests = counter("requests", "Requests that ended, by adapter")
        self.adapter_failures = counter("failures", "Requests that failed or were aborted")
        self.adapter_tokens = counter("generation_tokens", "Tokens generated, by adapter")
        self.adapter_seconds = summary("request_seconds", "Time of requests, by adapter")
        self.adapter_first_token = summary("first_token_seconds", "Time to first tokens")
        self.admission = Histogram(
            "lorafleet_admission_seconds",
            "Time until a request's adapter was found, loaded and allowed to start",
            ("replica",),
            buckets=buckets.STEP_S,
            registry=self.registry,
        ).labels(self.replica_id)
        self.cold_loads = Histogram(
            "lorafleet_cold_load_seconds",
            "Time to fetch, check and load an adapter that a replica did not know",
            ("replica", "outcome"),
            buckets=buckets.STEP_S,
            registry=self.registry,
        )
        self.resolver_seconds = Histogram(
            "lorafleet_resolver_seconds",
            "Time for look-ups and fetches of adapters, by resolver",
            ("replica", "backend", "outcome"),
            buckets=buckets.STEP_S,
            registry=self.registry,
        )

    def _forget(self, adapter: str) -> None:
        for metric in (
            self.adapter_requests,
            self.adapter_failures,
            self.adapter_tokens,
            self.adapter_seconds,
            self.adapter_first_token,
        ):
            metric.remove(self.replica_id, adapter)
