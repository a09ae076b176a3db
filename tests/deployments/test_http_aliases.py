"""Aliases over HTTP."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deployments.aliases import AliasTarget
from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

ALIASES = "/v1/adapters/aliases"


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend()
    backend.register("sql", generation=7)
    return backend


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def test_set_show_and_delete(client: Client) -> None:
    put = await client.put(f"{ALIASES}/team/prod", json={"target": "base:sql@07"})
    assert put.status_code == 200
    document = put.json()
    assert document.pop("operation") == put.headers["x-lorafleet-operation"]
    assert document == {
        "object": "adapter.alias",
        "alias": "team/prod",
        "targets": [{"adapter": "sql@7", "weight": 1.0}],
        "generation": 9,
        "created_at": 0.0,
        "created_by": "",
    }
    assert (await client.get(ALIASES)).json() == {"object": "list", "data": [document]}
    assert (await client.get(f"{ALIASES}/team/prod")).json() == document
    cards = (await client.get("/v1/models")).json()["data"]
    assert (cards[-1]["id"], cards[-1]["root"]) == ("team/prod", "alias:sql@7")
    assert (await client.get("/v1/models/team/prod")).json() == cards[-1]
    assert (await client.delete(f"{ALIASES}/team/prod")).status_code == 200
    assert_error(await client.delete(f"{ALIASES}/team/prod"), 404, "model")
    assert_error(await client.get(f"{ALIASES}/team/prod"), 404, "model")


async def test_weights_keep_their_order(client: Client, backend: FakeBackend) -> None:
    await client.put(f"{ALIASES}/prod", json={"weights": {"sql@8": 5, "sql@7": 95}})
    assert backend.aliases["prod"].targets == (AliasTarget("sql@8", 5), AliasTarget("sql@7", 95))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "target"),
        ({"target": "sql", "weights": {"sql": 1}}, 400, "target"),
        ({"weights": {}}, 400, "body.weights"),
        ({"weights": {"sql": 0}}, 400, "weights"),
        ({"weights": {"sql": -1}}, 400, "weights"),
        ({"weights": {"sql": 1, "base:sql": 1}}, 400, "weights"),
        ({"target": "base"}, 400, "target"),
        ({"target": "../x"}, 404, "target"),
        ({"target": "sql@x"}, 404, "target"),
    ],
)
async def test_bad_aliases(client: Client, body: Json, status: int, param: str) -> None:
    assert_error(await client.put(f"{ALIASES}/prod", json=body), status, param)


async def test_an_adapters_name_is_no_alias(client: Client) -> None:
    response = await client.put(f"{ALIASES}/sql", json={"target": "sql"})
    assert_error(response, 400, "lora_name")


async def test_views_are_for_users_and_changes_for_administrators(backend: FakeBackend) -> None:
    user = {"authorization": "Bearer user"}
    async with Client(backend, HttpSettings(api_key="user", admin_api_key="admin")) as client:
        assert_error(await client.get(ALIASES), 401, None)
        assert (await client.get(ALIASES, headers=user)).status_code == 200
        for method in ("PUT", "DELETE"):
            assert_error(await client.request(method, f"{ALIASES}/x", headers=user), 403, None)


async def test_the_user_decides_the_share_else_the_request(
    client: Client, backend: FakeBackend
) -> None:
    body = {"model": "sql", "prompt": ["a", "b"]}
    await client.post("/v1/completions", json={**body, "user": "ann"})
    await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert [request.split_key for request in backend.requests] == ["ann", "ann", "mine", "mine"]
