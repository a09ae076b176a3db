"""POST /v1/chat/completions: what comes back, whole and streamed."""

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import EOS, FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def chat(client: Client, **body: object) -> Json:
    response = await client.post(PATH, json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    document: Json = response.json()
    return document


async def test_whole_response_has_every_key(client: Client) -> None:
    document = await chat(client)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{16}", document.pop("id"))
    assert isinstance(document.pop("created"), int)
    assert document.pop("system_fingerprint").startswith("lorafleet-")
    assert document == {
        "object": "chat.completion",
        "model": "base",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello world",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 14,
            "completion_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


async def test_output_runs_to_the_end_of_the_context_by_default(
    client: Client, backend: FakeBackend
) -> None:
    await chat(client)
    assert backend.requests[-1].params.max_tokens is None


async def test_max_completion_tokens_wins(client: Client, backend: FakeBackend) -> None:
    await chat(client, max_tokens=9, max_completion_tokens=3)
    assert backend.requests[-1].params.max_tokens == 3
    await chat(client, max_tokens=9)
    assert backend.requests[-1].params.max_tokens == 9


async def test_template_fields_reach_the_replica(client: Client, backend: FakeBackend) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "So", "name": "bot"},
    ]
    await chat(
        client,
        messages=messages,
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        documents=[{"title": "t"}],
    )
    prompt = backend.requests[-1].prompt
    assert prompt.messages == (
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "So", "name": "bot"},
    )
    assert prompt.chat_template_kwargs == {"enable_thinking": False}
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    assert prompt.documents == [{"title": "t"}]


async def test_a_request_template_runs_only_where_it_is_trusted(backend: FakeBackend) -> None:
    body = {"messages": HI, "chat_template": "{{ 1 }}"}
    async with Client(backend) as client:
        assert_error(await client.post(PATH, json=body), 400, "chat_template")
    async with Client(backend, HttpSettings(trust_request_chat_template=True)) as client:
        assert (await client.post(PATH, json=body)).status_code == 200
    assert backend.requests[-1].prompt.chat_template == "{{ 1 }}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_refuses_the_roles_is_the_clients_error(
    client: Client, stream: bool
) -> None:
    response = await client.post(PATH, json={"messages": HI + HI, "stream": stream})
    error = assert_error(response, 400, "messages")
    assert error["message"] == "Conversation roles must alternate"


async def test_echo_of_a_continued_message(client: Client) -> None:
    body: Json = {
        "messages": [*HI, {"role": "assistant", "content": "So "}],
        "echo": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    document = await chat(client, **body)
    assert document["choices"][0]["message"]["content"] == "So Hello world"
    events = await client.events(PATH, body)
    deltas = [each["choices"][0]["delta"] for each in events]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "So "}]
    assert "".join(delta["content"] for delta in deltas) == "So Hello world"


async def test_logprobs_carry_bytes(client: Client) -> None:
    document = await chat(client, max_tokens=1, logprobs=True, top_logprobs=2)
    assert document["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "H",
                "logprob": -2.0,
                "bytes": [72],
                "top_logprobs": [
                    {"token": "!", "logprob": -0.5, "bytes": [33]},
                    {"token": "bytes:\\x82", "logprob": -1.0, "bytes": [0x82]},
                ],
            }
        ]
    }


async def test_logprobs_without_top(client: Client) -> None:
    document = await chat(client, max_tokens=1, logprobs=True)
    (content,) = document["choices"][0]["logprobs"]["content"]
    assert content["top_logprobs"] == []


async def test_prompt_logprobs_and_token_ids(client: Client) -> None:
    document = await chat(client, max_tokens=1, prompt_logprobs=0, return_token_ids=True)
    assert document["prompt_token_ids"] == [*b"Hi"]
    assert document["choices"][0]["token_ids"] == [72]
    assert document["prompt_logprobs"] == [
        None,
        {"105": {"logprob": -2.0, "rank": 3, "decoded_token": "i"}},
    ]


async def test_stream_begins_with_the_role_and_ends_with_the_reason(client: Client) -> None:
    first, *events = await client.events(PATH, {"messages": HI})
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    choices = [each["choices"][0] for each in events]
    assert all(choice["delta"].keys() == {"content"} for choice in choices)
    assert "".join(choice["delta"]["content"] for choice in choices) == "Hello world"
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert [("stop_reason" in choice) for choice in choices].index(True) == len(choices) - 1
    assert len({(each["id"], each["created"], each["model"]) for each in [first, *events]}) == 1


async def test_stream_of_several_choices_with_usage(client: Client) -> None:
    body = {
        "messages": HI,
        "n": 2,
        "max_tokens": 3,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *events, last = await client.events(PATH, body)
    assert [each["choices"][0]["delta"].get("role") for each in events[:2]] == ["assistant"] * 2
    assert events[0]["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    texts = ["", ""]
    for each in events:
        texts[each["choices"][0]["index"]] += each["choices"][0]["delta"]["content"]
    assert texts == ["Hel", "Hel"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


async def test_streamed_logprobs_and_ids_make_the_whole(client: Client) -> None:
    body: Json = {"messages": HI, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = (await chat(client, **body))["choices"][0]
    first, *events = await client.events(PATH, body)
    assert first["prompt_token_ids"] == [*b"Hi"]
    choices = [each["choices"][0] for each in events]
    assert [each for choice in choices for each in choice["token_ids"]] == [*b"Hello world", EOS]
    content = [each for choice in choices for each in choice["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "body.messages.1.role"),
        ({"role": 1, "content": "x"}, "body.messages.1.role"),
        ({"role": "user"}, "body.messages.1.content"),
        ({"role": "user", "content": None}, "body.messages.1.content"),
        ({"role": "user", "content": {"text": "x"}}, "body.messages.1.content"),
        ({"role": "user", "content": ["x"]}, "body.messages.1.content.0"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "body.messages.1.content.0.type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "body.messages.1.content.0.text"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]},
            "body.messages.1.tool_calls.0",
        ),
    ],
)
async def test_bad_messages_are_named(client: Client, message: Json, param: str) -> None:
    response = await client.post(PATH, json={"messages": [*HI, message]})
    assert_error(response, 400, param)
