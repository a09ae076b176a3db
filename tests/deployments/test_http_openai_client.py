"""OpenAI's own client, blocking and async, against a real socket."""

from collections.abc import AsyncIterator, Iterator

import openai
import pydantic
import pytest
import pytest_asyncio

from deployments.http_app import create_http_app
from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import serving

KEY = "secret"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, str]]:
    backend = FakeBackend()
    backend.register("sql", generation=3)
    with serving(create_http_app(backend, HttpSettings(api_key=KEY))) as url:
        yield backend, f"{url}/v1"


@pytest.fixture
def url(served: tuple[FakeBackend, str]) -> str:
    return served[1]


@pytest.fixture
def backend(served: tuple[FakeBackend, str], monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """What answers, as it is until the test ends."""
    for name in ("reply", "tool_parser"):
        monkeypatch.setattr(served[0], name, getattr(served[0], name))
    return served[0]


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
    assert client.models.retrieve("base:sql").id == "sql"
    page = client.models.list(extra_query={"limit": 1})
    assert [model.id for model in page.data] == ["base"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_completion(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="sql", prompt="x", logprobs=1, max_tokens=2)
    assert completion.model == "sql"
    assert client.completions.create(model="base:sql", prompt="x").model == "base:sql"
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


class City(pydantic.BaseModel):
    name: str
    people: int


def test_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model="sql", input="Hi", max_output_tokens=30, store=False)
    assert response.output_text == "Hello world"
    assert (response.status, response.model) == ("completed", "sql")
    assert response.usage is not None
    assert response.usage.total_tokens == 14


def test_response_stream(client: openai.OpenAI) -> None:
    with client.responses.create(model="base", input="Hi", stream=True) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello world"
    assert events[-1].type == "response.completed"


def test_response_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.responses.stream(model="base", input="Hi") as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "Hello world"


async def test_response_asynchronously(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.responses.stream(model="base", input="Hi") as stream:
        assert (await stream.get_final_response()).output_text == "Hello world"


def test_structures_are_parsed(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.reply = '{"name":"Rome","people":3}'
    response = client.responses.parse(model="base", input="Hi", text_format=City)
    assert response.output_parsed == City(name="Rome", people=3)
    with client.responses.stream(model="base", input="Hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    chat = client.chat.completions.parse(model="base", messages=MESSAGES, response_format=City)
    assert chat.choices[0].message.parsed == response.output_parsed


def test_calls_are_parsed(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.tool_parser = "hermes"
    backend.reply = '[{"name":"City","parameters":{"name":"Rome","people":3}}]'
    tool = openai.pydantic_function_tool(City)
    chat = client.chat.completions.parse(
        model="base", messages=MESSAGES, tools=[tool], tool_choice="required"
    )
    (call,) = chat.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == City(name="Rome", people=3)
    with client.chat.completions.stream(
        model="base", messages=MESSAGES, tools=[tool], tool_choice="required"
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == City(name="Rome", people=3)


def test_responses_refuse_and_fail_as_exceptions(
    client: openai.OpenAI, backend: FakeBackend
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="base", input="Hi", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    # Without a format the client asks for base64 and reads it itself.
    found = client.embeddings.create(model="sql", input=["\x06bcdefgh", "x"])
    assert found.data[0].embedding == pytest.approx([0.6, 0.8])
    assert (len(found.data), found.usage.total_tokens) == (2, 9)
    shown = client.embeddings.create(model="sql", input="\x06bcdefgh", encoding_format="float")
    assert shown.data[0].embedding == pytest.approx([0.6, 0.8])
