"""What a replica counts, and that a number of adapters cannot make it count without bound."""

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.samples import Sample

from adapters import AdapterVersion
from deployments.metrics.adapter_labels import OTHER, AdapterLabels
from deployments.metrics.engine_collector import EngineCollector
from deployments.metrics.replica_metrics import ReplicaMetrics
from engine.outputs import FinishReason, RequestOutput
from tests.deployments.fake_engine import FakeEngine, FakeResidency, FakeStats

PLACE = {"model_name": "base", "engine": "r1"}


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> ReplicaMetrics:
    return ReplicaMetrics("base", "r1", 1000, now=clock)


def output(num_tokens: int, finish: FinishReason | None = None, *, index: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id="one",
        index=index,
        token_ids=(1,) * num_tokens,
        finish_reason=finish,
        request_finished=finish is not None,
    )


def value(metrics: ReplicaMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def run_request(metrics: ReplicaMetrics, clock: Clock, adapter: str | None = "sql") -> None:
    with metrics.request() as record:
        clock.time += 0.5
        record.admitted(adapter)
        record.tokenized(7)
        clock.time += 1.0
        record.outputs([output(1)])
        clock.time += 0.25
        record.outputs([output(4)])
        clock.time += 0.75
        record.outputs([output(5, FinishReason.STOP)])


def test_times_are_those_of_the_request(metrics: ReplicaMetrics, clock: Clock) -> None:
    run_request(metrics, clock)
    expected = {
        "vllm:time_to_first_token_seconds_sum": 1.5,
        "vllm:e2e_request_latency_seconds_sum": 2.5,
        "vllm:request_decode_time_seconds_sum": 1.0,
        "vllm:inter_token_latency_seconds_sum": 1.0,
        "vllm:inter_token_latency_seconds_count": 9,
        "vllm:request_prompt_tokens_sum": 7,
        "vllm:request_generation_tokens_sum": 10,
    }
    for name, wanted in expected.items():
        assert value(metrics, name, **PLACE) == pytest.approx(wanted), name
    per_token = value(metrics, "vllm:request_time_per_output_token_seconds_sum", **PLACE)
    assert per_token == pytest.approx(1.0 / 9)
    assert value(metrics, "lorafleet_admission_seconds_sum", replica="r1") == pytest.approx(0.5)
    ended = value(metrics, "vllm:request_success_total", **PLACE, finished_reason="stop")
    assert ended == 1


def test_tokens_fall_into_the_bucket_of_their_own_wait(
    metrics: ReplicaMetrics, clock: Clock
) -> None:
    run_request(metrics, clock)
    name = "vllm:inter_token_latency_seconds_bucket"
    assert value(metrics, name, **PLACE, le="0.05") == 0
    assert value(metrics, name, **PLACE, le="0.075") == 4
    assert value(metrics, name, **PLACE, le="0.2") == 9


def test_sequences_side_by_side_wait_for_their_own_tokens_only(
    metrics: ReplicaMetrics, clock: Clock
) -> None:
    with metrics.request() as record:
        record.admitted(None)
        record.tokenized(1)
        record.outputs([output(1), output(1, index=1)])
        clock.time += 1.0
        record.outputs(
            [output(5), output(5, FinishReason.LENGTH, index=1)],
        )
    total = value(metrics, "vllm:inter_token_latency_seconds_sum", **PLACE)
    assert total == pytest.approx(10 * 0.2)
    per_token = value(metrics, "vllm:request_time_per_output_token_seconds_sum", **PLACE)
    assert per_token == pytest.approx(1.0 / 5)


def test_adapters_are_told_apart_and_the_base_model_has_its_name(
    metrics: ReplicaMetrics, clock: Clock
) -> None:
    run_request(metrics, clock, "sql")
    run_request(metrics, clock, "sql")
    run_request(metrics, clock, None)
    for adapter, count in (("sql", 2), ("base", 1)):
        place = {"replica": "r1", "adapter": adapter}
        assert value(metrics, "lorafleet_adapter_requests_total", **place) == count
        assert value(metrics, "lorafleet_adapter_failures_total", **place) == 0
        assert value(metrics, "lorafleet_adapter_generation_tokens_total", **place) == 10 * count
        seconds = value(metrics, "lorafleet_adapter_request_seconds_sum", **place)
        assert seconds == pytest.approx(2.5 * count)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("engine"), "error"), (asyncio.CancelledError(), "abort")],
)
def test_a_request_that_breaks_off_is_a_failure_of_its_adapter(
    metrics: ReplicaMetrics, clock: Clock, error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)), metrics.request() as record:
        record.admitted("sql")
        record.tokenized(1)
        record.outputs([output(1)])
        raise error
    place = {"replica": "r1", "adapter": "sql"}
    assert value(metrics, "lorafleet_adapter_failures_total", **place) == 1
    assert value(metrics, "vllm:request_success_total", **PLACE, finished_reason=reason) == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count", **PLACE) == 0


def test_names_that_nobody_serves_get_no_label(metrics: ReplicaMetrics) -> None:
    for _ in range(3):
        with pytest.raises(LookupError), metrics.request():
            raise LookupError("no such adapter")
    place = {"replica": "r1", "adapter": OTHER}
    assert value(metrics, "lorafleet_adapter_failures_total", **place) == 3
    assert sample_names(metrics, "lorafleet_adapter_requests_total") == {OTHER}


def test_ten_thousand_adapters_are_a_hundred_series(metrics: ReplicaMetrics, clock: Clock) -> None:
    for number in range(10_000):
        run_request(metrics, clock, f"adapter-{number}")
        clock.time -= 2.5
    labels = sample_names(metrics, "lorafleet_adapter_requests_total")
    assert len(labels) == 101 and OTHER in labels
    place = {"replica": "r1", "adapter": OTHER}
    assert value(metrics, "lorafleet_adapter_requests_total", **place) == 9900


def test_an_idle_label_goes_to_the_next_adapter_and_its_series_end() -> None:
    clock, forgotten = Clock(), list[str]()
    labels = AdapterLabels(forgotten.append, max_labels=2, idle_s=60, now=clock)
    assert [labels.label(name) for name in ("a", "b", "c")] == ["a", "b", OTHER]
    clock.time += 59
    assert labels.label("a") == "a"
    clock.time += 1
    assert labels.label("c") == "c"
    assert forgotten == ["b"]
    assert labels.label("b") == OTHER


def test_series_of_a_forgotten_adapter_are_gone(metrics: ReplicaMetrics, clock: Clock) -> None:
    for number in range(100):
        run_request(metrics, clock, f"adapter-{number}")
    clock.time += 3600
    run_request(metrics, clock, "new")
    text = generate_latest(metrics.registry).decode()
    assert 'adapter="adapter-0"' not in text
    assert 'adapter="new"' in text


def test_snapshots_are_made_once_a_second(metrics: ReplicaMetrics, clock: Clock) -> None:
    first = metrics.snapshot()
    run_request(metrics, clock)
    clock.time -= 2.5
    assert metrics.snapshot() is first
    clock.time += 1
    assert metrics.snapshot() != first


def test_the_engine_is_read_when_asked(metrics: ReplicaMetrics) -> None:
    engine = BusyEngine()
    metrics.registry.register(EngineCollector(engine, "base", "r1", lambda: engine.versions))
    assert value(metrics, "vllm:num_requests_running", **PLACE) == 3
    assert value(metrics, "vllm:num_requests_waiting", **PLACE) == 2
    assert value(metrics, "vllm:kv_cache_usage_perc", **PLACE) == 0.25
    assert value(metrics, "vllm:prompt_tokens_total", **PLACE) == 80
    assert value(metrics, "vllm:prefix_cache_hits_total", **PLACE) == 16
    assert value(metrics, "lorafleet_slots_in_use", replica="r1") == 1
    assert value(metrics, "lorafleet_adapters_in_host_memory", replica="r1") == 2
    assert value(metrics, "lorafleet_adapters_in_slots", replica="r1") == 1
    assert value(metrics, "lorafleet_slot_loads_total", replica="r1") == 5
    info = {
        "max_lora": "8",
        "running_lora_adapters": "sql",
        "waiting_lora_adapters": "csv",
        **PLACE,
    }
    assert value(metrics, "vllm:lora_requests_info", **info) is not None


def version(name: str, digest: str) -> AdapterVersion:
    return AdapterVersion(
        name=name,
        generation=1,
        digest=digest,
        source_uri=f"file:///{name}",
        base_model="base",
        rank=8,
        size_bytes=1,
    )


class BusyEngine(FakeEngine):
    versions = (
        version("sql", "a" * 64),
        version("csv", "b" * 64),
    )

    def stats(self) -> FakeStats:
        return FakeStats(
            num_running=3,
            num_waiting=2,
            num_slots_in_use=1,
            total_prompt_tokens=80,
            total_cached_prompt_tokens=16,
            total_slot_loads=5,
        )

    def loras(self) -> list[FakeResidency]:
        return [
            FakeResidency(digest="a" * 64, slot=0, num_running=3),
            FakeResidency(digest="b" * 64),
        ]


def sample_names(metrics: ReplicaMetrics, name: str) -> set[str]:
    return {sample.labels["adapter"] for sample in _samples(metrics) if sample.name == name}


def _samples(metrics: ReplicaMetrics) -> Iterator[Sample]:
    for family in metrics.registry.collect():
        yield from family.samples
