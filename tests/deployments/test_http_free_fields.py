"""Fields of any shape, schemas and tools and metadata, hold what JSON can be written with."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(FakeBackend(tool_parser="hermes", reply="[]")) as client:
        yield client


def bodies(value: Any) -> list[tuple[str, str, Json]]:
    """Route, field and body for every place in which a value can be anything."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, value]}}}
    function = {"name": "f", "parameters": schema}
    named = {"name": "n", "schema": schema}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "x": value}
    called = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    response_format = {"type": "json_schema", "json_schema": named}
    chat: list[tuple[str, Json]] = [
        ("response_format", {"response_format": response_format}),
        ("structured_outputs", {"structured_outputs": {"json": schema}}),
        ("guided_json", {"guided_json": schema}),
        ("tools", {"tools": [{"type": "function", "function": function}]}),
        (
            "tools",
            {
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
            },
        ),
        ("messages", {"messages": called}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"x": value}}),
        ("documents", {"documents": [{"x": value}]}),
        ("unknown", {"unknown": {"x": [[value]]}}),
    ]
    responses: list[tuple[str, Json]] = [
        ("text", {"text": {"format": {"type": "json_schema", **named}}}),
        ("tools", {"tools": [{"type": "function", **function}]}),
        ("metadata", {"metadata": {"x": value}}),
    ]
    return [
        *((CHAT, field, {"messages": MESSAGES, **body}) for field, body in chat),
        *((RESPONSES, field, {"input": "x", **body}) for field, body in responses),
    ]


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, 10**4000])
async def test_integers_beyond_64_bits_are_refused_by_name(client: Client, value: int) -> None:
    for path, field, body in bodies(value):
        for stream in (False, True):
            response = await client.post(path, json={**body, "stream": stream})
            assert_error(response, 400, field)


@pytest.mark.parametrize("value", [(1 << 64) - 1, -(1 << 63), 1e308, "9" * 5000, None])
async def test_what_json_can_be_written_with_is_no_failure(client: Client, value: Any) -> None:
    for path, field, body in bodies(value):
        response = await client.post(path, json=body)
        # Some fields want texts only.
        assert response.status_code in (200, 400), (field, response.text)
