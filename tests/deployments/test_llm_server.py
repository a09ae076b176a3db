"""One replica's requests: admitted, encoded, streamed and let go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

from deployments.backend import BaseModelInfo, UnloadAdapter
from deployments.cluster_protocol import ForcedEnd
from deployments.errors import AdapterNotFoundError, AdapterSourceError, ReplicaUnavailableError
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    GenerationStart,
    PromptInput,
    TokenizeRequest,
)
from deployments.llm_server import LLMServer
from engine.errors import EngineDeadError, InvalidRequestError, QueueFullError
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from tests.deployments.cluster import BASE, Cluster, Replica, running_cluster

INFO = BaseModelInfo(id=BASE, root=BASE, max_model_len=128, vocab_size=256, created=0)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1") as cluster:
        yield cluster


@pytest.fixture
def replica(cluster: Cluster) -> Replica:
    return cluster.replicas["r1"]


@pytest.fixture
def server(replica: Replica) -> LLMServer:
    server = LLMServer("r1", replica.engine, INFO)
    server.attach(replica.link)
    return server


def request(adapter: str | None = None, **fields: Any) -> GenerateRequest:
    fields.setdefault("prompt", PromptInput(text="hello"))
    fields.setdefault("params", SamplingParams(max_tokens=3))
    return GenerateRequest(request_id="one", adapter=adapter, **fields)


async def collect(
    stream: AsyncIterator[GenerationItem],
) -> tuple[GenerationStart, list[RequestOutput]]:
    start, outputs = None, []
    async for item in stream:
        if isinstance(item, GenerationStart):
            assert start is None
            start = item
        else:
            outputs.extend(item)
    assert start is not None
    return start, outputs


async def test_base_model_request(server: LLMServer, replica: Replica) -> None:
    start, outputs = await collect(server.generate(request()))
    assert start == GenerationStart(
        replica_id="r1",
        adapter_name=None,
        generation=0,
        prompt_token_ids=tuple(map(ord, "hello")),
    )
    assert "".join(output.text for output in outputs) == "base base base "
    assert outputs[-1].request_finished
    assert replica.engine.running == {}


async def test_adapter_request_runs_on_its_version(cluster: Cluster, server: LLMServer) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    start, outputs = await collect(server.generate(request("sql")))
    assert (start.adapter_name, start.generation) == ("sql", version.generation)
    assert outputs[0].text.startswith(version.digest[:8])
    assert server.resident_names() == ["sql"]


async def test_prompt_can_be_cut_to_its_end(server: LLMServer) -> None:
    start, _ = await collect(server.generate(request(truncate_prompt_tokens=2)))
    assert start.prompt_token_ids == tuple(map(ord, "lo"))
    start, _ = await collect(server.generate(request(prompt=PromptInput(token_ids=(1, 2)))))
    assert start.prompt_token_ids == (1, 2)
    with pytest.raises(InvalidRequestError):
        await collect(server.generate(request(prompt=PromptInput(text=""))))


async def test_closed_stream_frees_engine_and_adapter(
    cluster: Cluster, server: LLMServer, replica: Replica
) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    replica.engine.token_delay_s = 0.001
    stream = server.generate(request("sql", params=SamplingParams(max_tokens=10_000)))
    async with aclosing(cast("Any", stream)) as items:
        await anext(items)
        await anext(items)
        assert replica.engine.running
        await cluster.clock.finish(cluster.unload("sql"))
        assert version.digest in replica.engine.loaded
    assert replica.engine.running == {}
    await cluster.clock.until(lambda: not replica.engine.loaded)


async def test_cancelled_consumer_frees_engine_and_adapter(
    cluster: Cluster, server: LLMServer, replica: Replica
) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    replica.engine.token_delay_s = 0.001
    endless = request("sql", params=SamplingParams(max_tokens=10_000))
    task = asyncio.create_task(collect(server.generate(endless)))
    await cluster.clock.until(lambda: bool(replica.engine.running))
    task.cancel()
    await asyncio.wait((task,))
    await cluster.clock.until(lambda: not replica.engine.running)
    await cluster.clock.finish(cluster.unload("sql"))
    await cluster.clock.until(lambda: not replica.engine.loaded)


async def test_forced_unload_ends_running_requests(
    cluster: Cluster, server: LLMServer, replica: Replica
) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    replica.engine.token_delay_s = 0.001
    endless = request("sql", params=SamplingParams(max_tokens=100_000))
    task = asyncio.create_task(collect(server.generate(endless)))
    await cluster.clock.until(lambda: bool(replica.engine.running))
    await cluster.clock.finish(
        cluster.controller.unload(UnloadAdapter(name="sql", force=True), "u")
    )
    await server.abort_running(ForcedEnd("sql", version.generation))
    _, outputs = await task
    assert outputs[-1].finish_reason is FinishReason.ABORT


async def test_forced_unload_ends_requests_that_the_engine_does_not_know_yet(
    cluster: Cluster, server: LLMServer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    encode, go_on = server._encoder.encode, asyncio.Event()

    async def encode_slowly(*arguments: Any, **options: Any) -> list[int]:
        await go_on.wait()
        return await encode(*arguments, **options)

    monkeypatch.setattr(server._encoder, "encode", encode_slowly)
    replica.engine.token_delay_s = 0.001
    endless = request("sql", params=SamplingParams(max_tokens=100_000))
    task = asyncio.create_task(collect(server.generate(endless)))
    await cluster.clock.until(lambda: bool(server.in_flight()))
    await server.abort_running(ForcedEnd("sql", version.generation))
    go_on.set()
    _, outputs = await task
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert server.in_flight() == []


async def test_what_is_loaded_after_a_forced_unload_is_not_aborted(
    cluster: Cluster, server: LLMServer, replica: Replica
) -> None:
    path = cluster.write_adapter("sql")
    await cluster.clock.finish(cluster.load("sql", path))
    await cluster.clock.finish(cluster.unload("sql", force=True))
    await cluster.clock.finish(cluster.load("sql", path))
    for end in replica.aborted:
        await server.abort_running(end)
    stream = collect(server.generate(request("sql")))
    _, outputs = await cluster.clock.finish(stream)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_errors_come_before_the_start(
    cluster: Cluster, server: LLMServer, replica: Replica
) -> None:
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(anext(server.generate(request("nobody"))))
    replica.engine.max_running = 0
    with pytest.raises(QueueFullError):
        await anext(server.generate(request()))


async def test_changed_source_blames_the_model_field(
    cluster: Cluster, server: LLMServer, replica: Replica
) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql", "one")))
    cluster.lose_store(replica.name)
    cluster.write_adapter("sql", "two")
    with pytest.raises(AdapterSourceError) as caught:
        await anext(server.generate(request("sql")))
    assert caught.value.param == "model"


async def test_dead_engine_is_an_unavailable_replica(
    server: LLMServer, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*_: object, **__: object) -> AsyncIterator[list[RequestOutput]]:
        raise EngineDeadError("dead")
        yield []

    monkeypatch.setattr(replica.engine, "generate", dead)
    with pytest.raises(ReplicaUnavailableError):
        await anext(server.generate(request()))


async def test_replica_that_has_not_joined_serves_the_base_model_only(replica: Replica) -> None:
    server = LLMServer("r1", replica.engine, INFO)
    await collect(server.generate(request()))
    with pytest.raises(ReplicaUnavailableError):
        await anext(server.generate(request("sql")))


async def test_tokenize_and_detokenize(server: LLMServer) -> None:
    result = await server.tokenize(TokenizeRequest(prompt=PromptInput(text="hey")))
    assert result.token_ids == tuple(map(ord, "hey"))
    assert result.token_strs == ("h", "e", "y")
    assert await server.detokenize(result.token_ids) == "hey"
