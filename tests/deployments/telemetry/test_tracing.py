"""From a client's trace to the engine's steps: which spans there are, and what they say."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deployments.backend import BaseModelInfo
from deployments.errors import AdapterNotFoundError
from deployments.generation import GenerateRequest, PromptInput
from deployments.http_app import create_http_app
from deployments.llm_server import LLMServer
from deployments.telemetry.http_telemetry import HttpTelemetry
from deployments.telemetry.request_origin import RequestOrigin
from deployments.telemetry.request_telemetry import RequestTelemetry
from deployments.telemetry.settings import TelemetrySettings
from deployments.telemetry.tracing import make_tracer
from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig
from engine.sampling_params import SamplingParams
from tests.deployments.cluster import BASE, Cluster, running_cluster
from tests.deployments.local_backend import LocalBackend
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.tiny_models import MakeModel

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
STAGES = ["resolve", "tokenize", "queue", "prefill", "decode"]


class Traces:
    """A tracer whose finished spans can be looked at."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def named(self) -> dict[str, ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture(scope="module")
def engine(make_model: MakeModel) -> Iterator[AsyncEngine]:
    path = make_model("llama")
    save_tiny_tokenizer(path, vocab_size=131)
    config = EngineConfig(
        model=path,
        device="cpu",
        max_model_len=128,
        num_threads=1,
        cache=CacheConfig(num_blocks=64),
    )
    engine = AsyncEngine(config)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.stop())


@pytest_asyncio.fixture
async def client(engine: AsyncEngine, traces: Traces) -> AsyncIterator[httpx.AsyncClient]:
    base = BaseModelInfo(
        id="tiny", root="tiny", max_model_len=128, vocab_size=engine.vocab_size, created=0
    )
    telemetry = RequestTelemetry("r1", "tiny", traces.tracer)
    server = LLMServer("r1", engine, base, telemetry=telemetry)
    app = create_http_app(LocalBackend(server), telemetry=HttpTelemetry(traces.tracer))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def complete(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    body = {"prompt": "the-quick-brown-fox", "max_tokens": 5, "ignore_eos": True}
    return await client.post("/v1/completions", json=body, headers=headers)


async def test_the_clients_trace_goes_on_to_the_engines_steps(
    client: httpx.AsyncClient, traces: Traces
) -> None:
    answer = await complete(client, traceparent=TRACEPARENT, **{"x-request-id": "mine"})
    assert answer.status_code == 200
    spans = traces.named()
    http = spans["POST /v1/completions"]
    assert http.kind is SpanKind.SERVER
    assert http.parent is not None and f"{http.parent.span_id:016x}" == PARENT_ID
    assert dict(http.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "lorafleet.request_id": "mine",
    }
    assert spans.keys() == {http.name, "generate", *STAGES}
    for span in spans.values():
        assert f"{context(span).trace_id:032x}" == TRACE_ID
    generate = spans["generate"]
    assert parent_of(generate) == context(http).span_id
    assert {parent_of(spans[stage]) for stage in STAGES} == {context(generate).span_id}
    told = dict(generate.attributes or {})
    assert told["lorafleet.request_id"] == "mine"
    assert told["gen_ai.response.id"] == f"{answer.json()['id']}-0"
    assert told["lorafleet.finish_reason"] == "length"
    assert told["gen_ai.usage.output_tokens"] == 5


async def test_stages_follow_each_other_within_the_request(
    client: httpx.AsyncClient, traces: Traces
) -> None:
    await complete(client)
    spans = traces.named()
    for stage in STAGES:
        begin, end = times(spans[stage])
        assert begin <= end, stage
    for earlier, later in pairwise(STAGES[2:]):
        # Both come from one reading of a clock; turning it to the wall's may cost a microsecond.
        assert abs(times(spans[later])[0] - times(spans[earlier])[1]) < 1_000_000
    assert context(spans["generate"]).trace_id != int(TRACE_ID, 16)


async def test_probes_and_scrapes_leave_no_spans(client: httpx.AsyncClient, traces: Traces) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200
    assert traces.named() == {}


async def test_a_refused_request_is_a_span_with_its_status(
    client: httpx.AsyncClient, traces: Traces
) -> None:
    answer = await client.post("/v1/completions", json={"prompt": 5})
    assert answer.status_code == 400
    (span,) = traces.named().values()
    assert (span.attributes or {})["http.response.status_code"] == 400
    assert span.status.status_code is StatusCode.UNSET


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1") as cluster:
        yield cluster


def traced_server(cluster: Cluster, traces: Traces) -> LLMServer:
    replica = cluster.replicas["r1"]
    info = BaseModelInfo(id=BASE, root=BASE, max_model_len=128, vocab_size=256, created=0)
    telemetry = RequestTelemetry("r1", BASE, traces.tracer)
    server = LLMServer("r1", replica.engine, info, telemetry=telemetry)
    server.attach(replica.link)
    return server


def request(adapter: str, *, max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        request_id="cmpl-1-0",
        prompt=PromptInput(text="hello"),
        params=SamplingParams(max_tokens=max_tokens),
        adapter=adapter,
        origin=RequestOrigin(request_id="mine", traceparent=TRACEPARENT),
    )


async def test_every_span_of_a_replica_names_adapter_generation_and_request(
    cluster: Cluster, traces: Traces
) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    server = traced_server(cluster, traces)
    async for _ in server.generate(request("sql")):
        pass
    spans = traces.named()
    assert spans.keys() == {"generate", *STAGES}
    for span in spans.values():
        told = span.attributes or {}
        assert told["lorafleet.adapter"] == "sql"
        assert told["lorafleet.generation"] == version.generation
        assert told["lorafleet.request_id"] == "mine"
        assert told["lorafleet.replica"] == "r1"


async def test_an_unknown_adapter_fails_while_it_is_resolved(
    cluster: Cluster, traces: Traces
) -> None:
    server = traced_server(cluster, traces)
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(anext(aiter(server.generate(request("nobody")))))
    spans = traces.named()
    assert spans.keys() == {"generate", "resolve"}
    assert spans["generate"].status.status_code is StatusCode.ERROR
    assert (spans["generate"].attributes or {})["error.type"] == "AdapterNotFoundError"
    assert (spans["resolve"].attributes or {})["lorafleet.adapter"] == "nobody"


async def test_an_abandoned_request_is_told_as_aborted(cluster: Cluster, traces: Traces) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    cluster.replicas["r1"].engine.token_delay_s = 0.001
    server = traced_server(cluster, traces)
    stream = cast("Any", server.generate(request("sql", max_tokens=10_000)))
    async with aclosing(stream) as items:
        await anext(items)
    assert (traces.named()["generate"].attributes or {})["lorafleet.finish_reason"] == "abort"


def test_a_collector_is_used_only_where_one_is_named() -> None:
    assert make_tracer(TelemetrySettings(), "r1") is None


def test_without_traces_the_sdk_is_not_even_imported() -> None:
    code = (
        "import sys\n"
        "for name in ('opentelemetry.sdk', 'opentelemetry.exporter'):\n"
        "    sys.modules[name] = None\n"
        "import deployments.llm_server, deployments.http_app\n"
        "from deployments.telemetry.http_telemetry import HttpTelemetry\n"
        "from deployments.telemetry.settings import TelemetrySettings\n"
        "from deployments.telemetry.tracing import make_tracer\n"
        "assert make_tracer(TelemetrySettings(), 'r1') is None\n"
        "with HttpTelemetry().follow({'method': 'GET', 'path': '/v1/models'}, 'id'):\n"
        "    pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def context(span: ReadableSpan) -> Any:
    return span.get_span_context()


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time
