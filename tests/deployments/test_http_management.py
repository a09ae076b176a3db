"""The JSON routes that change adapters, and the pages of their list."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, assert_error

ADAPTERS = "/v1/adapters"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def test_load_replace_pin_and_unload(client: Client, backend: FakeBackend) -> None:
    body = {"name": "team/sql", "source": "/adapters/sql"}
    loaded = await client.post(ADAPTERS, json=body)
    assert loaded.status_code == 200
    assert loaded.json() == {
        "object": "adapter.version",
        "name": "team/sql",
        "generation": 1,
        "digest": "d" * 64,
        "source": "file:///adapters/team/sql",
        "pinned": False,
        "rank": 8,
        "size_bytes": 1000,
        "operation": loaded.headers["x-lorafleet-operation"],
    }
    assert_error(await client.post(ADAPTERS, json=body), 400, "lora_name")
    replaced = await client.post(ADAPTERS, json={**body, "replace": True})
    assert replaced.json()["generation"] == 2
    for action, pinned in (("pin", True), ("unpin", False)):
        changed = await client.post(f"{ADAPTERS}/team/sql/{action}")
        assert changed.json()["pinned"] is pinned
    gone = await client.delete(f"{ADAPTERS}/team/sql", params={"force": "true", "timeout_s": "3"})
    assert gone.json()["generation"] == 2
    assert (backend.unloads[-1].force, backend.unloads[-1].timeout_s) == (True, 3)
    assert_error(await client.delete(f"{ADAPTERS}/team/sql"), 404, "model")


async def test_rollback_with_and_without_a_generation(client: Client, backend: FakeBackend) -> None:
    backend.register("sql", generation=5)
    backend.kept["sql"] = [replace(backend.adapters["sql"], generation=3, digest="e" * 64)]
    (row,) = (await client.get(ADAPTERS)).json()["data"]
    assert [(kept["generation"], kept["digest"]) for kept in row["kept"]] == [(3, "e" * 64)]
    back = await client.post(f"{ADAPTERS}/sql/rollback")
    assert (back.json()["generation"], back.json()["digest"]) == (6, "e" * 64)
    await client.post(f"{ADAPTERS}/sql/rollback", json={"generation": 3})
    assert [rollback.generation for rollback in backend.rollbacks] == [None, 3]
    bad = await client.post(f"{ADAPTERS}/sql/rollback", json={"generation": 0})
    assert_error(bad, 400, "body.generation")
    assert_error(await client.post(f"{ADAPTERS}/other/rollback"), 409, "generation")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", ADAPTERS),
        ("DELETE", f"{ADAPTERS}/x"),
        ("POST", f"{ADAPTERS}/x/rollback"),
        ("POST", f"{ADAPTERS}/x/pin"),
    ],
)
async def test_changes_need_the_admin_key_and_the_permission(
    backend: FakeBackend, method: str, path: str
) -> None:
    settings = HttpSettings(api_key="user", admin_api_key="admin")
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    async with Client(backend, settings) as client:
        assert_error(await client.request(method, path, headers=user), 403, None)
        backend.allow_runtime_updating = False
        assert_error(await client.request(method, path, headers=admin), 404, None)


async def test_the_list_is_filtered_and_paged(client: Client, backend: FakeBackend) -> None:
    for index in range(5):
        backend.register(f"team/a{index}")
    backend.register("other")
    backend.adapters["team/a3"] = replace(backend.adapters["team/a3"], pinned=True)

    async def names(**params: str) -> tuple[list[str], bool]:
        document = (await client.get(ADAPTERS, params=params)).json()
        return [row["name"] for row in document["data"]], document["has_more"]

    assert await names(prefix="team/", limit="2") == (["team/a0", "team/a1"], True)
    assert await names(prefix="team/", limit="3", after="team/a1") == (
        ["team/a2", "team/a3", "team/a4"],
        False,
    )
    assert await names(pinned="true") == (["team/a3"], False)
    assert await names(state="replacing") == ([], False)
    assert len((await names())[0]) == 6
    for bad in ({"limit": "0"}, {"state": "gone"}, {"prefex": "x"}):
        assert (await client.get(ADAPTERS, params=bad)).status_code == 400
