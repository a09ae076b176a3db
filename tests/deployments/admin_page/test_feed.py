"""The stream behind the page: whole at first, then changes, at little cost to the cluster."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from deployments.admin_page.feed import FleetFeed
from deployments.errors import ReplicaUnavailableError
from deployments.openai.settings import HttpSettings
from tests.deployments.admin_page.busy_fleet import BusyFleet
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client


@pytest.fixture
def fleet() -> BusyFleet:
    return BusyFleet(num_adapters=5)


@pytest.fixture
def feed(fleet: BusyFleet) -> FleetFeed:
    return FleetFeed(fleet, period_s=0.01)


async def read(stream: Any) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(await asyncio.wait_for(anext(stream), 5))
    return document


async def test_the_first_document_is_whole_and_the_next_are_changes(
    fleet: BusyFleet, feed: FleetFeed
) -> None:
    async with aclosing(feed.events("base")) as stream:
        assert await read(stream) == {"base_model": "base", "may_update": True}
        whole = await read(stream)
        assert whole["full"] and [a["name"] for a in whole["adapters"]] == sorted(fleet.adapters)
        changes = await read(stream)
        assert (changes["full"], changes["adapters"], changes["removed"]) == (False, [], [])
        gone, changed = sorted(fleet.adapters)[:2]
        del fleet.adapters[gone]
        fleet.adapters[changed] = replace(fleet.adapters[changed], generation=99)
        while not (changes["removed"] or changes["adapters"]):
            changes = await read(stream)
        assert changes["removed"] == [gone]
        assert [(a["name"], a["generation"]) for a in changes["adapters"]] == [(changed, 99)]


async def test_traffic_is_summed_over_replicas(fleet: BusyFleet, feed: FleetFeed) -> None:
    async with aclosing(feed.events("base")) as stream:
        await read(stream)
        traffic = (await read(stream))["traffic"]
    assert traffic.keys() == fleet.adapters.keys()
    requests = sum(row[0] for row in traffic.values())
    seconds_count = sum(row[4] for row in traffic.values())
    assert requests == seconds_count > 0


async def test_all_pages_share_one_look(fleet: BusyFleet) -> None:
    feed = FleetFeed(fleet, period_s=60)
    async with aclosing(feed.events("base")) as first, aclosing(feed.events("base")) as second:
        for stream in (first, second):
            while "replicas" not in await read(stream):
                pass
    assert fleet.looks == 1


async def test_a_page_that_comes_later_gets_everything_and_misses_nothing(
    fleet: BusyFleet, feed: FleetFeed
) -> None:
    async with aclosing(feed.events("base")) as first:
        for _ in range(3):
            await read(first)
        async with aclosing(feed.events("base")) as second:
            whole = await read(second)
            assert whole["full"] and len(whole["adapters"]) == 5
            fleet.register("new", 7)
            names: list[str] = []
            while not names:
                names = [a["name"] for a in (await read(second))["adapters"]]
            assert names == ["new"]


async def test_a_page_that_is_late_gets_everything_anew(
    fleet: BusyFleet, feed: FleetFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.admin_page.feed._MAX_LATE", 2)
    async with aclosing(feed.events("base")) as stream:
        await read(stream)
        async with aclosing(feed.events("base")) as other:
            for _ in range(6):
                await read(other)
        documents = [await read(stream) for _ in range(2)]
    assert any(d["full"] and len(d["adapters"]) == 5 and "base_model" in d for d in documents)


async def test_nobody_is_asked_while_no_page_is_open(fleet: BusyFleet, feed: FleetFeed) -> None:
    async with aclosing(feed.events("base")) as stream:
        for _ in range(2):
            await read(stream)
    looks = fleet.looks
    await asyncio.sleep(0.05)
    assert fleet.looks == looks


async def test_a_controller_that_is_away_is_said_and_waited_for(
    fleet: BusyFleet, feed: FleetFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ReplicaUnavailableError("the controller has ended, try again")

    async with aclosing(feed.events("base")) as stream:
        await read(stream)
        with monkeypatch.context() as patch:
            patch.setattr(fleet, "list_replicas", fail)
            document: dict[str, Any] = {}
            while "error" not in document:
                document = await read(stream)
            assert document == {"error": "the controller has ended, try again"}
        while "error" in document:
            document = await read(stream)
        assert document["replicas"]


@pytest.mark.parametrize("path", ["", "/app.css", "/app.js", "/icon.svg", "/grid.js"])
async def test_files_are_served_with_a_strict_policy(path: str) -> None:
    async with Client(FakeBackend()) as client:
        response = await client.get(f"/admin{path}")
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        again = await client.get(
            f"/admin{path}", headers={"if-none-match": response.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/admin/other.js", "/admin/..%2fpages.py", "/admin/pages.py"])
async def test_nothing_else_is_served(path: str) -> None:
    async with Client(FakeBackend()) as client:
        assert (await client.get(path)).status_code == 404


async def test_the_stream_needs_the_admin_key_and_the_files_do_not() -> None:
    settings = HttpSettings(api_key="user", admin_api_key="admin")
    async with Client(FakeBackend(), settings) as client:
        assert (await client.get("/admin")).status_code == 200
        assert (await client.get("/admin/events")).status_code == 401
        user = {"authorization": "Bearer user"}
        response: httpx.Response = await client.get("/admin/events", headers=user)
        assert response.status_code == 403
