"""OpenAI's own client, blocking and async, against a real socket."""

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from deployments.http_app import create_http_app
from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import serving

KEY = "secret"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    backend = FakeBackend()
    backend.register("sql", generation=3)
    with serving(create_http_app(backend, HttpSettings(api_key=KEY))) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["base", "sql"]
    assert client.models.retrieve("sql").owned_by == "lorafleet"


def test_completion(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="sql", prompt="x", logprobs=1, max_tokens=2)
    assert completion.model == "sql"
    assert completion.choices[0].text == "He"
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["H", "e"]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2


def test_completion_stream(client: openai.OpenAI) -> None:
    with client.completions.create(model="base", prompt="x", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello world"


def test_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="base", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body={"top_k": 5}
    )
    assert chat.choices[0].message.content == "Hello world"
    assert chat.choices[0].message.tool_calls is None
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].bytes == [72]


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="base",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.total_tokens == 14


def test_chat_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="base", messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].finish_reason == "stop"


async def test_async_streams_side_by_side(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.completions.create(model="base", prompt="x", stream=True)
    chat = await async_client.chat.completions.create(model="sql", messages=MESSAGES, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    said = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
    assert text == said == "Hello world"


async def test_async_raw_response_has_our_headers(async_client: openai.AsyncOpenAI) -> None:
    raw = await async_client.completions.with_raw_response.create(model="sql", prompt="x")
    assert raw.headers["x-lorafleet-adapter-generation"] == "3"
    assert raw.parse().choices[0].text == "Hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_become_the_clients_exceptions(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x", stream=stream)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="base", prompt="x", temperature=-1, stream=stream)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(
            model="base", prompt="x", stream=stream
        )
