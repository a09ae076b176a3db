"""What a client sees when its request cannot be served."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deployments.errors import (
    OverloadedError,
    ReplicaUnavailableError,
    ResolverUnavailableError,
)
from deployments.openai.settings import HttpSettings
from engine.errors import CapacityError, InvalidAdapterError, QueueFullError
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT: Json = {"prompt": "x"}
MESSAGES: Json = {"messages": [{"role": "user", "content": "Hi"}]}

UNKNOWN_MODELS = ["nope", "base:nope", "base@1", "base:", "base:base:sql", "x" * 300]
UNKNOWN_MODELS += ["sql@9", "sql@", "sql@x", "sql@٣", "sql@1@1", "sql@" + "1" * 30]
UNKNOWN_MODELS += ["../x", "/etc", "sql/", "a\0b", "a b", " ", "é"]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", -1, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 2, "min_p"),
        ("n", 0, "n"),
        ("n", 10**6, "n"),
        ("seed", 1 << 80, "seed"),
        ("min_tokens", -1, "min_tokens"),
        ("presence_penalty", 3, "presence_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-300, "repetition_penalty"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"٣": 1}, "logit_bias"),
        ("logit_bias", {"5000": 1}, "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("logit_bias", {"1": 1, "01": 2}, "logit_bias"),
        ("stop", [""], "stop"),
        ("stop_token_ids", [5000], "stop_token_ids"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        (
            "stream_options",
            {"include_obfuscation": True},
            "body.stream_options.include_obfuscation",
        ),
        ("max_tokens", "5", "body.max_tokens"),
        ("max_tokens", 5.0, "body.max_tokens"),
        ("max_tokens", True, "body.max_tokens"),
        ("max_tokens", 1 << 70, "body.max_tokens"),
        ("temperature", "hot", "body.temperature"),
        ("stream", "yes", "body.stream"),
        ("stop", [1], "body.stop.0"),
        ("model", 5, "body.model"),
        ("stop_token_ids", [-1], "body.stop_token_ids.0"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
async def test_a_bad_value_is_refused_by_name(
    client: Client, path: str, body: Json, field: str, value: object, param: str
) -> None:
    error = assert_error(await client.post(path, json={**body, field: value}), 400, param)
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": 5}, "body.prompt"),
        ({"prompt": {"text": "x"}}, "body.prompt"),
        ({"prompt": ["a", 1]}, "body.prompt"),
        ({"prompt": [1, "a"]}, "body.prompt"),
        ({"prompt": [True]}, "body.prompt"),
        ({"prompt": [1.0]}, "body.prompt"),
        ({"prompt": [[1], 2]}, "body.prompt"),
        ({"prompt": [[[1]]]}, "body.prompt"),
        ({"prompt": ["x"] * 600, "n": 2}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "min_tokens": 30}, "min_tokens"),
        ({"prompt": "x", "logprobs": 100}, "logprobs"),
        ({"prompt": "x", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x" * 64}, "input_tokens"),
        ({"prompt": "x" * 64, "stream": True}, "input_tokens"),
    ],
)
async def test_bad_completions(client: Client, body: Json, param: str) -> None:
    assert_error(await client.post(COMPLETIONS, json=body), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "body.messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "body.messages"),
        ({"messages": ["Hi"]}, "body.messages.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "body.logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"documents": ["x"]}, "body.documents.0"),
    ],
)
async def test_bad_chats(client: Client, body: Json, param: str) -> None:
    assert_error(await client.post(CHAT, json={**MESSAGES, **body}), 400, param)


async def test_prompt_too_long_says_both_lengths(client: Client) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "x" * 70})
    message = assert_error(response, 400, "input_tokens")["message"]
    assert "64" in message
    assert "70" in message


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "best_of", True),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "cache_salt", "s"),
        (COMPLETIONS, "max_completion_tokens", 5),
        (CHAT, "tool_choice", "auto"),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "store", True),
    ],
)
async def test_what_would_not_be_honoured_is_refused_by_name(
    client: Client, backend: FakeBackend, path: str, field: str, value: object
) -> None:
    body = PROMPT if path == COMPLETIONS else MESSAGES
    response = await client.post(path, json={**body, field: value})
    assert field in assert_error(response, 400, field)["message"]
    assert not backend.requests


async def test_fields_that_ask_for_nothing_are_accepted(client: Client) -> None:
    neutral = {"suffix": None, "best_of": 1, "response_format": {"type": "text"}, "bad_words": []}
    unknown = {"nobody_knows_this": {"x": 1}, "user": "u", "metadata": {"a": "b"}}
    response = await client.post(COMPLETIONS, json={**PROMPT, **neutral, **unknown})
    assert response.status_code == 200
    chat = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False}
    response = await client.post(CHAT, json={**MESSAGES, **chat, **unknown})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", UNKNOWN_MODELS)
async def test_unknown_models_are_not_found(
    client: Client, backend: FakeBackend, model: str, stream: bool
) -> None:
    backend.register("sql", generation=1)
    body = {**PROMPT, "model": model, "stream": stream}
    error = assert_error(await client.post(COMPLETIONS, json=body), 404, "model")
    assert error["type"] == "NotFoundError"
    assert "does not exist" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param", "retry"),
    [
        (OverloadedError("full"), 429, None, "1"),
        (QueueFullError("full"), 429, None, "1"),
        (CapacityError("pinned"), 503, None, "1"),
        (ReplicaUnavailableError("gone"), 503, None, "1"),
        (ResolverUnavailableError("sql", "403"), 503, "model", "1"),
        (InvalidAdapterError("bad"), 400, None, None),
        (RuntimeError("secret"), 500, None, None),
    ],
)
async def test_errors_before_the_first_token_have_their_status(
    backend: FakeBackend,
    error: Exception,
    status: int,
    param: str | None,
    retry: str | None,
    stream: bool,
) -> None:
    backend.fail_at_start = error
    async with Client(backend) as client:
        response = await client.post(CHAT, json={**MESSAGES, "stream": stream})
    described = assert_error(response, status, param)
    assert response.headers.get("retry-after") == retry
    assert response.headers["x-request-id"]
    assert "secret" not in described["message"]
    assert backend.closed


async def test_a_failure_of_one_prompt_ends_all(client: Client, backend: FakeBackend) -> None:
    body = {"prompt": ["a", "x" * 70, "c"]}
    assert_error(await client.post(COMPLETIONS, json=body), 400, "input_tokens")
    assert len(backend.closed) == len(backend.requests) == 3


async def test_a_stream_that_is_cancelled_from_elsewhere_is_an_error(
    client: Client, backend: FakeBackend
) -> None:
    backend.fail_at_start = asyncio.CancelledError()
    async with asyncio.timeout(10):
        assert_error(await client.post(COMPLETIONS, json=PROMPT), 500, None)


async def test_an_error_in_the_middle_is_the_last_event(
    client: Client, backend: FakeBackend
) -> None:
    backend.fail_after_first_item = ReplicaUnavailableError("the replica died")
    *events, last = await client.events(COMPLETIONS, PROMPT)
    assert events[0]["choices"][0]["text"] == "He"
    assert last == {
        "error": {
            "message": "the replica died",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    }


async def test_an_error_in_the_middle_of_a_whole_response_has_its_status(
    client: Client, backend: FakeBackend
) -> None:
    backend.fail_after_first_item = ReplicaUnavailableError("the replica died")
    assert_error(await client.post(COMPLETIONS, json=PROMPT), 503, None)


async def test_oversize_bodies_are_refused_announced_or_not(backend: FakeBackend) -> None:
    async with Client(backend, HttpSettings(max_body_bytes=100)) as client:
        headers = {"content-type": "application/json"}
        announced = await client.post(COMPLETIONS, content=b" " * 101, headers=headers)
        assert_error(announced, 413, "body")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(11):
                yield b" " * 10

        assert_error(await client.post(COMPLETIONS, content=chunks(), headers=headers), 413, "body")
        assert (await client.post(COMPLETIONS, json=PROMPT)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("FROB", CHAT, 405),
    ],
)
async def test_routing_errors_have_the_envelope(
    client: Client, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert ("allow" in response.headers) == (status == 405)
