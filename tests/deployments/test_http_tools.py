"""Tools and reasoning in chats: what the model is told, and what comes of its text."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from deployments.generation import PromptInput
from tests.deployments.fake_backend import EOS, FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>{"name":"clock","arguments":{}}</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(tool_parser="hermes")


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def chat(client: Client, **body: object) -> Json:
    response = await client.post(PATH, json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    choice: Json = response.json()["choices"][0]
    return choice


async def streamed(client: Client, **body: object) -> tuple[Json, list[Json]]:
    """The message that the deltas make, and the choices of all events."""
    events = await client.events(PATH, {"messages": HI, **body})
    choices = [each["choices"][0] for each in events]
    message: Json = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({**call["function"]})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, choices


async def test_auto_lets_the_model_choose(client: Client, backend: FakeBackend) -> None:
    backend.reply = "So." + CALL
    choice = await chat(client, tools=[WEATHER, CLOCK])
    message = choice["message"]
    assert message["content"] == "So."
    (call,) = message["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "clock", "arguments": "{}"}}
    assert choice["finish_reason"] == "tool_calls"
    request = backend.requests[-1]
    assert request.params.structured is None
    tools = request.prompt.tools
    assert tools is not None and [tool["function"]["name"] for tool in tools] == [
        "weather",
        "clock",
    ]


async def test_a_text_without_calls_is_a_message(client: Client, backend: FakeBackend) -> None:
    choice = await chat(client, tools=[CLOCK])
    assert choice["message"]["content"] == "Hello world"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_a_call_alone_has_no_content(client: Client, backend: FakeBackend) -> None:
    backend.reply = CALL
    assert (await chat(client, tools=[CLOCK]))["message"]["content"] is None


async def test_streamed_deltas_make_the_whole(client: Client, backend: FakeBackend) -> None:
    backend.reply = 'Hm <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
    message, choices = await streamed(client, tools=[CLOCK], return_token_ids=True)
    assert message["content"] == "Hm"
    assert message["tool_calls"] == [{"name": "f", "arguments": '{"a":1}'}]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
        "tool_calls"
    ]
    ids = [each for choice in choices for each in choice.get("token_ids") or ()]
    assert ids == [*backend.reply.encode(), EOS]


async def test_choices_are_read_apart(client: Client, backend: FakeBackend) -> None:
    backend.reply = CALL
    response = await client.post(PATH, json={"messages": HI, "tools": [CLOCK], "n": 2})
    choices = response.json()["choices"]
    calls = [choice["message"]["tool_calls"] for choice in choices]
    assert [len(each) for each in calls] == [1, 1]
    assert calls[0][0]["id"] != calls[1][0]["id"]


async def test_without_parallel_calls_only_the_first_counts(
    client: Client, backend: FakeBackend
) -> None:
    backend.reply = '<tool_call>{"name":"a"}</tool_call><tool_call>{"name":"b"}'
    two = await chat(client, tools=[CLOCK])
    assert len(two["message"]["tool_calls"]) == 2
    one = await chat(client, tools=[CLOCK], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["a"]


async def test_none_hides_the_tools(client: Client, backend: FakeBackend) -> None:
    backend.reply = CALL
    choice = await chat(client, tools=[CLOCK], tool_choice="none")
    assert choice["message"]["content"] == CALL
    assert backend.requests[-1].prompt.tools is None


async def test_required_makes_the_model_call(client: Client, backend: FakeBackend) -> None:
    backend.tool_parser = None
    backend.reply = '[{"name": "weather", "parameters": {"city": "x"}}]'
    choice = await chat(client, tools=[WEATHER, CLOCK], tool_choice="required")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "x"}'}
    assert choice["finish_reason"] == "tool_calls"
    structured = backend.requests[-1].params.structured
    assert structured is not None and structured.kind == "lark"


async def test_a_named_function_gets_its_arguments(client: Client, backend: FakeBackend) -> None:
    backend.reply = '{"city": "x"}'
    choice = await chat(client, tools=[WEATHER, CLOCK], tool_choice=NAMED)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "x"}'}
    assert choice["finish_reason"] == "stop"
    structured = backend.requests[-1].params.structured
    assert structured is not None and isinstance(structured.source, str)
    assert json.loads(structured.source) == SCHEMA


async def test_earlier_calls_reach_the_template_as_values(
    client: Client, backend: FakeBackend
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "4"},
    ]
    await chat(client, messages=messages, max_tokens=1)
    sent = backend.requests[-1].prompt.messages
    assert sent is not None
    assert sent[1]["content"] == ""
    assert sent[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {"tools": [CLOCK], "tool_choice": NAMED},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}]}, "body.tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=str,
)
async def test_what_makes_no_sense_is_named(client: Client, body: Json, param: str | None) -> None:
    response = await client.post(PATH, json={"messages": HI, **body})
    assert_error(response, 400, param or "body.tools.0.function.name")


@pytest.mark.parametrize(
    "calls",
    [
        "x",
        [1],
        [{"type": "function"}],
        [{"function": {"name": 1}}],
        [{"type": "custom", "function": {"name": "f"}}],
        [{"function": {"name": "f", "arguments": "{"}}],
        [{"function": {"name": "f", "arguments": "[1]"}}],
    ],
    ids=str,
)
async def test_bad_calls_in_messages_are_named(client: Client, calls: Any) -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": calls}]
    response = await client.post(PATH, json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("body.messages.1.tool_calls")


async def test_auto_needs_a_known_format(client: Client, backend: FakeBackend) -> None:
    backend.tool_parser = None
    response = await client.post(PATH, json={"messages": HI, "tools": [CLOCK]})
    assert_error(response, 400, "tool_choice")
    assert backend.closed == [request.request_id for request in backend.requests]


@pytest.mark.parametrize("in_reasoning", [False, True])
async def test_reasoning_is_a_field_of_its_own(
    client: Client, backend: FakeBackend, in_reasoning: bool
) -> None:
    backend.reasoning_parser, backend.in_reasoning = "think", in_reasoning
    backend.reply = ("" if in_reasoning else "<think>") + "Hm.</think>\n\nYes. " + CALL
    choice = await chat(client, tools=[CLOCK])
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Hm.", "Hm.")
    assert message["content"] == "Yes."
    assert len(message["tool_calls"]) == 1
    whole, _ = await streamed(client, tools=[CLOCK])
    assert (whole["reasoning"], whole["content"]) == ("Hm.", "Yes.")


async def test_reasoning_can_be_left_out(client: Client, backend: FakeBackend) -> None:
    backend.reasoning_parser, backend.in_reasoning = "think", True
    backend.reply = "Hm.</think>Yes."
    message = (await chat(client, include_reasoning=False))["message"]
    assert message["content"] == "Yes." and message["reasoning"] is None
    whole, choices = await streamed(client, include_reasoning=False)
    assert (whole["reasoning"], whole["content"]) == ("", "Yes.")
    assert not any("reasoning" in choice["delta"] for choice in choices)


async def test_text_is_content_where_the_prompt_has_closed_the_reasoning(
    client: Client, backend: FakeBackend
) -> None:
    backend.reasoning_parser, backend.in_reasoning = "think", None
    message = (await chat(client))["message"]
    assert (message["content"], message["reasoning"]) == ("Hello world", None)


async def test_tokenize_renders_tools(client: Client, backend: FakeBackend) -> None:
    asked: list[PromptInput] = []
    tokenize = backend.tokenize

    async def watch(request: Any) -> Any:
        asked.append(request.prompt)
        return await tokenize(request)

    backend.tokenize = watch  # type: ignore[method-assign]
    response = await client.post("/tokenize", json={"messages": HI, "tools": [CLOCK]})
    assert response.status_code == 200
    assert asked[0].tools is not None and asked[0].tools[0]["function"]["name"] == "clock"
