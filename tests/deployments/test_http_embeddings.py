"""Embeddings: what is asked of the engine, and the two ways of writing vectors."""

import base64
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

PATH = "/v1/embeddings"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def embed(client: Client, **body: object) -> Json:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    document: Json = response.json()
    return document


async def test_each_input_has_its_vector_in_order(client: Client, backend: FakeBackend) -> None:
    backend.register("sql")
    document = await embed(client, model="sql", input=["\x03", "\x06bcdefgh"], normalize=False)
    assert document == {
        "object": "list",
        "model": "sql",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 1.0]},
            {"object": "embedding", "index": 1, "embedding": [6.0, 8.0]},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert [request.adapter for request in backend.requests] == ["sql", "sql"]
    assert [request.params.pooling for request in backend.requests] == ["last", "last"]


async def test_vectors_have_length_one_unless_asked_otherwise(client: Client) -> None:
    (item,) = (await embed(client, input=[6, 1, 1, 1, 1, 1, 1, 1]))["data"]
    assert item["embedding"] == pytest.approx([0.6, 0.8])


async def test_base64_is_little_endian_float32(client: Client) -> None:
    (item,) = (await embed(client, input="\x03", encoding_format="base64", normalize=False))["data"]
    assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("value", "count"),
    [("ab", 1), (["ab", "c"], 2), ([1, 2], 1), ([[1], [2, 3], [4]], 3)],
)
async def test_texts_and_token_ids_alone_and_in_batches(
    client: Client, value: object, count: int
) -> None:
    assert len((await embed(client, input=value, pooling="mean"))["data"]) == count


async def test_inputs_are_cut_where_the_client_says(client: Client, backend: FakeBackend) -> None:
    long = "x" * 90
    response = await client.post(PATH, json={"input": long})
    assert_error(response, 400, "input_tokens")
    assert (await embed(client, input=long, truncate_prompt_tokens=5))["usage"]["total_tokens"] == 5
    assert (await embed(client, input=long, truncate_prompt_tokens=-1))["usage"][
        "total_tokens"
    ] == 63


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "body.input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [""]}, 400, "input"),
        ({"input": {"text": "x"}}, 400, "body.input"),
        ({"input": ["x", 1]}, 400, "body.input"),
        ({"input": [5000]}, 400, "input"),
        ({"input": ["x"] * 1025}, 400, "input"),
        ({"input": "x", "dimensions": 5}, 400, "dimensions"),
        ({"input": "x", "encoding_format": "bytes"}, 400, "body.encoding_format"),
        ({"input": "x", "pooling": "cls"}, 400, "body.pooling"),
        ({"input": "x", "messages": []}, 400, "messages"),
        ({"input": "x", "embed_dtype": "float16"}, 400, "embed_dtype"),
        ({"input": "x", "model": "nope"}, 404, "model"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: Client, body: Json, status: int, param: str
) -> None:
    assert_error(await client.post(PATH, json=body), status, param)
