"""Too much work: refused early, given up in time, and finished when the server is to end."""

import asyncio

import pytest

from deployments.backend import BaseModelInfo
from deployments.errors import OverloadedError
from deployments.generation import GenerateRequest, PromptInput
from deployments.llm_server import LLMServer
from deployments.openai.settings import HttpSettings
from engine.errors import DeadlineExceededError, QueueFullError
from engine.sampling_params import SamplingParams
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.fake_engine import FakeEngine, FakeTokenizer
from tests.deployments.http_client import Client, Json, assert_error

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [OverloadedError("full"), QueueFullError("full")])
async def test_full_queues_answer_429_and_when_to_try_again(stream: bool, error: Exception) -> None:
    async with Client(FakeBackend(fail_at_start=error)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
        assert_error(response, 429, None)
        assert response.headers["retry-after"] == "1"
        metrics = (await client.get("/metrics")).text
    assert 'lorafleet_http_refusals_total{reason="queue_full"} 1.0' in metrics


@pytest.mark.parametrize("before_start", [False, True])
async def test_what_is_not_finished_within_its_timeout_answers_408(before_start: bool) -> None:
    backend = FakeBackend(gate=asyncio.Event(), gate_before_start=before_start)
    body: Json = {"prompt": ["x", "y"], "timeout": 0.05}
    async with Client(backend) as client:
        response = await client.post(COMPLETIONS, json=body)
        metrics = (await client.get("/metrics")).text
    error = assert_error(response, 408, "timeout")
    assert error["type"] == "TimeoutError"
    assert "0.05 s" in error["message"]
    assert response.headers["x-should-retry"] == "false"
    assert 'lorafleet_http_refusals_total{reason="timeout"} 1.0' in metrics
    assert len(backend.closed) == 2
    assert {request.timeout_s for request in backend.requests} == {0.05}


async def test_a_stream_that_runs_out_of_time_says_so_and_ends() -> None:
    backend = FakeBackend(fail_after_first_item=DeadlineExceededError("not finished in time"))
    async with Client(backend) as client:
        events = await client.events(COMPLETIONS, {"prompt": "x"})
    assert events[-1]["error"]["code"] == 408


@pytest.mark.parametrize("value", [0, -1, 86_401, "5", True])
async def test_a_timeout_is_a_number_of_seconds(value: object) -> None:
    async with Client(FakeBackend()) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "timeout": value})
    assert_error(response, 400, "body.timeout")


async def test_requests_are_the_tenants_whose_key_they_came_with() -> None:
    backend = FakeBackend()
    async with Client(backend, HttpSettings(api_key="user", admin_api_key="admin")) as client:
        for key in ("user", "admin"):
            headers = {"authorization": f"Bearer {key}"}
            await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    assert [request.tenant for request in backend.requests] == ["api-key", "admin-key"]


async def test_a_replica_refuses_before_it_tokenises() -> None:
    tokenised: list[str] = []

    class Tokenizer(FakeTokenizer):
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            tokenised.append(text)
            return {"input_ids": [1]}

    engine = FakeEngine(max_running=0, tokenizer=Tokenizer())
    info = BaseModelInfo(id="b", root="b", max_model_len=128, vocab_size=256, created=0)
    server = LLMServer("r1", engine, info)
    request = GenerateRequest(request_id="r", prompt=PromptInput(text="x"), params=SamplingParams())
    with pytest.raises(QueueFullError):
        await anext(server.generate(request))
    assert tokenised == []
