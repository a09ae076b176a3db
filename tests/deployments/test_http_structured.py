"""The fields that restrict an output become one restriction, or are refused by name."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.structured import JSON_OBJECT, StructuredOutput
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

COMPLETIONS = {"path": "/v1/completions", "prompt": "x"}
CHAT = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


@pytest.mark.parametrize("target", [COMPLETIONS, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", JSON_OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            SCHEMA_TEXT,
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", JSON_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
    ],
    ids=str,
)
async def test_every_spelling_reaches_the_engine(
    client: Client, backend: FakeBackend, target: Json, fields: Json, kind: str, source: object
) -> None:
    body = {**target, **fields}
    response = await client.post(body.pop("path"), json=body)
    assert response.status_code == 200, response.text
    (field,) = fields
    assert backend.requests[-1].params.structured == StructuredOutput(
        kind=kind, source=source, field=field
    )


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
async def test_plain_text_is_not_restricted(
    client: Client, backend: FakeBackend, fields: Json
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 200
    assert backend.requests[-1].params.structured is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "body.response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "body.response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "body.structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "body.structured_outputs.choice"),
        ({"guided_choice": "a"}, "body.guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_named(client: Client, fields: Json, param: str) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x", **fields})
    assert_error(response, 400, param)
