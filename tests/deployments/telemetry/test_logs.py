"""Log lines as JSON objects: what they are about can be read by machines."""

import io
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.backend import BaseModelInfo
from deployments.errors import AdapterNotFoundError
from deployments.generation import GenerateRequest, PromptInput
from deployments.http_app import create_http_app
from deployments.llm_server import LLMServer
from deployments.telemetry.logs import LOGGERS, JsonFormatter, configure_logs
from deployments.telemetry.request_origin import RequestOrigin, origin
from deployments.telemetry.request_telemetry import RequestTelemetry
from engine.sampling_params import SamplingParams
from tests.deployments.cluster import BASE, Cluster, running_cluster
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client


class Lines:
    """What was written to standard error."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def read(self, message: str = "") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._stream.getvalue().splitlines()]
        return [line for line in lines if message in ("", line["message"])]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """JSON logs, until the test is over."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    configure_logs("json", component="test")
    yield Lines(stream)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
        logger.setLevel(level)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1") as cluster:
        yield cluster


def server_of(cluster: Cluster) -> LLMServer:
    replica = cluster.replicas["r1"]
    info = BaseModelInfo(id=BASE, root=BASE, max_model_len=128, vocab_size=256, created=0)
    telemetry = RequestTelemetry("r1", BASE, None)
    server = LLMServer("r1", replica.engine, info, telemetry=telemetry)
    server.attach(replica.link)
    return server


def request(adapter: str) -> GenerateRequest:
    with origin(RequestOrigin(request_id="mine")):
        return GenerateRequest(
            request_id="cmpl-1-0",
            prompt=PromptInput(text="hello"),
            params=SamplingParams(max_tokens=3),
            adapter=adapter,
        )


async def test_a_request_is_one_line_with_adapter_and_generation(
    cluster: Cluster, lines: Lines
) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    async for _ in server_of(cluster).generate(request("sql")):
        pass
    (line,) = lines.read("request ended")
    assert line.pop("seconds") >= 0 and line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "deployments.telemetry.request_telemetry",
        "message": "request ended",
        "component": "test",
        "request_id": "mine",
        "completion_id": "cmpl-1-0",
        "adapter": "sql",
        "generation": version.generation,
        "replica": "r1",
        "finish_reason": "length",
        "num_prompt_tokens": 5,
        "num_output_tokens": 3,
    }


async def test_a_failed_request_says_why(cluster: Cluster, lines: Lines) -> None:
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(anext(aiter(server_of(cluster).generate(request("nobody")))))
    (line,) = lines.read("request ended")
    assert (line["adapter"], line["finish_reason"]) == ("nobody", "error")
    assert line["error"].startswith("AdapterNotFoundError: ")


async def test_changes_of_names_are_lines_with_their_generation(
    cluster: Cluster, lines: Lines
) -> None:
    version = await cluster.clock.finish(
        cluster.load("sql", cluster.write_adapter("sql"), op_id="deploy-7")
    )
    (line,) = lines.read("operation done")
    told = {key: line[key] for key in ("operation", "operation_id", "adapter", "generation")}
    assert told == {
        "operation": "load",
        "operation_id": "deploy-7",
        "adapter": "sql",
        "generation": version.generation,
    }


async def test_an_http_request_is_one_line_and_a_probe_is_none(lines: Lines) -> None:
    async with Client(FakeBackend()) as client:
        await client.get("/health")
        await client.get("/v1/models", headers={"x-request-id": "mine"})
    (line,) = lines.read("http request")
    assert (line["request_id"], line["route"], line["status"]) == ("mine", "/v1/models", 200)


async def test_other_lines_of_a_request_have_its_id(lines: Lines) -> None:
    app = create_http_app(FakeBackend())

    @app.get("/crash")
    async def crash() -> None:
        raise RuntimeError("out of order")

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/crash", headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    (line,) = (line for line in lines.read() if "exception" in line)
    assert line["request_id"] == "mine" and line["level"] == "error"
    assert "RuntimeError: out of order" in line["exception"]


def test_a_line_stays_one_line_whatever_is_logged() -> None:
    record = logging.makeLogRecord({"msg": "a\nb", "adapter": object(), "levelname": "INFO"})
    text = JsonFormatter().format(record)
    assert "\n" not in text and json.loads(text)["message"] == "a\nb"
