"""Responses: what the model is asked, what the answer is made of, and what is refused."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai.types.responses import Response

from deployments.errors import ReplicaUnavailableError
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
CALL = '<tool_call>{"name":"f"}</tool_call>'


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(tool_parser="hermes")


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def respond(client: Client, **body: object) -> Json:
    response = await client.post(PATH, json={"input": "Hi", **body})
    assert response.status_code == 200, response.text
    document: Json = response.json()
    # Every field that OpenAI's client promises is there, in the promised type.
    Response.model_validate(document, strict=True)
    return document


async def events(client: Client, **body: object) -> list[Json]:
    response = await client.post(PATH, json={"input": "Hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    found = []
    for number, frame in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


async def test_a_text_is_a_message(client: Client, backend: FakeBackend) -> None:
    backend.roles_must_alternate = False
    document = await respond(
        client, instructions="Be brief", max_output_tokens=40, temperature=0.5, metadata={"a": "b"}
    )
    (item,) = document["output"]
    assert item["id"].startswith("msg_")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
    ]
    assert (document["status"], item["status"], item["role"]) == (
        "completed",
        "completed",
        "assistant",
    )
    assert document["usage"]["output_tokens"] == 12
    assert document["usage"]["input_tokens_details"] == {
        "cached_tokens": 3,
        "cache_write_tokens": 0,
    }
    assert (document["instructions"], document["metadata"]) == ("Be brief", {"a": "b"})
    assert (document["store"], document["text"]) == (False, {"format": {"type": "text"}})
    request = backend.requests[-1]
    assert [dict(message) for message in request.prompt.messages or ()] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert (request.params.max_tokens, request.params.temperature) == (40, 0.5)
    assert request.given >= {"max_tokens", "temperature"}
    assert not request.given & {"top_p", "stop"}


async def test_a_text_that_was_cut_is_incomplete(client: Client) -> None:
    document = await respond(client, max_output_tokens=3)
    assert document["status"] == document["output"][0]["status"] == "incomplete"
    assert document["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await events(client, max_output_tokens=3))[-1]["type"] == "response.incomplete"


async def test_items_of_a_conversation_become_messages(
    client: Client, backend: FakeBackend
) -> None:
    backend.roles_must_alternate = False
    await respond(
        client,
        tools=[WEATHER],
        input=[
            {"role": "developer", "content": "Help"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm"}],
            },
            {
                "type": "function_call",
                "call_id": "a",
                "name": "weather",
                "arguments": '{"city":"x"}',
            },
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Sun", "annotations": []}],
            },
            {"role": "user", "content": "Thanks"},
        ],
    )
    messages = [dict(message) for message in backend.requests[-1].prompt.messages or ()]
    calls = messages[2].pop("tool_calls")
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [
        ("a", {"city": "x"}),
        ("b", {}),
    ]
    assert messages == [
        {"role": "system", "content": "Help"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
        {"role": "tool", "content": "sunny", "tool_call_id": "a", "name": "weather"},
        {"role": "assistant", "content": "Sun"},
        {"role": "user", "content": "Thanks"},
    ]


async def test_events_come_in_openais_order(client: Client) -> None:
    found = await events(client)
    kinds = [event["type"] for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event["delta"] for event in found if event["type"].endswith("text.delta")]
    assert "".join(deltas) == found[-4]["text"] == "Hello world"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-1]["response"]["usage"]["total_tokens"] == 14


async def test_reasoning_and_calls_are_items_of_their_own(
    client: Client, backend: FakeBackend
) -> None:
    backend.reasoning_parser, backend.in_reasoning = "think", False
    backend.reply = f"<think>H</think>S{CALL}"
    backend.per_item = 1
    document = await respond(client, tools=[WEATHER])
    reasoning, message, call = document["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "H"}]
    assert message["content"][0]["text"] == "S"
    assert (call["name"], call["arguments"], call["status"]) == (
        "f",
        "{}",
        "completed",
    )
    assert call["call_id"].startswith("call_")

    found = await events(client, tools=[WEATHER])
    added = [event for event in found if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in done]
    assert found[-1]["response"]["output"] == done
    pieces: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            pieces[event["type"]] = pieces.get(event["type"], "") + event["delta"]
    assert pieces == {
        "response.reasoning_text.delta": "H",
        "response.output_text.delta": "S",
        "response.function_call_arguments.delta": "{}",
    }


async def test_a_silent_model_says_an_empty_message(client: Client, backend: FakeBackend) -> None:
    backend.reply = ""
    (item,) = (await respond(client))["output"]
    assert item["content"][0]["text"] == ""


async def test_the_format_of_the_text_is_enforced(client: Client, backend: FakeBackend) -> None:
    wanted = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    document = await respond(client, text={"format": wanted})
    structured = backend.requests[-1].params.structured
    assert structured is not None
    assert (json.loads(str(structured.source)), structured.field) == (SCHEMA, "text.format")
    assert document["text"]["format"] == wanted
    await respond(client, text={"format": {"type": "json_object"}})
    assert backend.requests[-1].params.structured is not None
    await respond(client, text={"format": {"type": "text"}})
    assert backend.requests[-1].params.structured is None


async def test_a_required_call_is_enforced(client: Client, backend: FakeBackend) -> None:
    backend.reply = '{"city":"Rome"}'
    choice = {"type": "function", "name": "weather"}
    document = await respond(client, tools=[WEATHER], tool_choice=choice)
    (call,) = document["output"]
    assert (call["name"], call["arguments"]) == ("weather", backend.reply)
    assert document["tool_choice"] == choice
    assert document["tools"][0]["name"] == "weather"


async def test_log_probabilities_of_the_text(client: Client, backend: FakeBackend) -> None:
    backend.tool_parser = None
    document = await respond(
        client, include=["message.output_text.logprobs"], top_logprobs=1, max_output_tokens=2
    )
    first, second = document["output"][0]["content"][0]["logprobs"]
    assert (first["token"], first["bytes"], second["token"]) == ("H", [72], "e")
    assert [top["token"] for top in first["top_logprobs"]] == ["!"]
    found = await events(client, top_logprobs=1, max_output_tokens=2)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [each["token"] for event in deltas for each in event["logprobs"]] == ["H", "e"]


async def test_a_failure_in_the_middle_is_the_last_event(
    client: Client, backend: FakeBackend
) -> None:
    backend.fail_after_first_item = ReplicaUnavailableError("gone")
    last = (await events(client))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "body.input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "body.input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "body.input.0.role"),
        ({"input": [{"role": "user", "content": 3}]}, "body.input.0.content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "body.input.0.content.0.type",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "body.input.0.call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "no"}]},
            None,
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "body.input.0.encrypted_content",
        ),
        ({"max_output_tokens": 0}, "body.max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "body.include.0"),
        ({"reasoning": {"effort": "high"}}, "body.reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "body.tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "body.tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"tools": [WEATHER], "top_logprobs": 2}, "include"),
        ({"model": "nope"}, "model"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: Client, body: Json, param: str | None
) -> None:
    response = await client.post(PATH, json={"input": "Hi", **body})
    if param is None:
        assert response.status_code == 400
    else:
        assert_error(response, 404 if param == "model" else 400, param)
