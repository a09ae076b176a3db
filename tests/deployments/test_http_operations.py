"""Operations over HTTP: their ids, their views, and a log line for every refusal."""

import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deployments.backend import LoadAdapter
from deployments.errors import OperationTimeoutError
from deployments.openai.settings import HttpSettings
from deployments.operations import (
    Operation,
    OperationKind,
    OperationPhase,
    OperationQuery,
    OperationStatus,
    ReplicaPhase,
    ReplicaProgress,
)
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, assert_error

OPERATIONS = "/v1/adapters/operations"
LOAD = "/v1/load_lora_adapter"
BODY = {"lora_name": "x", "lora_path": "/x"}


@pytest.fixture
def backend() -> FakeBackend:
    operation = Operation(
        op_id="op-1",
        kind=OperationKind.LOAD,
        name="sql",
        phase=OperationPhase.PREPARING,
        generation=7,
        requested_by="admin-key",
        started_at=1.5,
    )
    replica = ReplicaProgress(replica_id="r1", phase=ReplicaPhase.REJECTED, reason="uses DoRA")
    backend = FakeBackend()
    backend.operations["op-1"] = OperationStatus(operation=operation, replicas=(replica,))
    return backend


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def test_an_operation_is_shown_with_its_replicas(client: Client) -> None:
    document = (await client.get(f"{OPERATIONS}/op-1")).json()
    assert document == {
        "object": "adapter.operation",
        "id": "op-1",
        "kind": "load",
        "name": "sql",
        "phase": "preparing",
        "generation": 7,
        "digest": None,
        "source": None,
        "reason": None,
        "requested_by": "admin-key",
        "requested_from": "",
        "started_at": 1.5,
        "ended_at": None,
        "replicas": [{"replica_id": "r1", "phase": "rejected", "reason": "uses DoRA"}],
    }
    assert (await client.get(OPERATIONS)).json() == {"object": "list", "data": [document]}


async def test_the_list_takes_filters(client: Client, backend: FakeBackend) -> None:
    await client.get(OPERATIONS, params={"name": "sql", "phase": "done", "limit": "3"})
    assert backend.operation_queries == [OperationQuery(name="sql", phase="done", limit=3)]
    for bad in ({"phase": "over"}, {"limit": "0"}, {"limit": "x"}, {"nmae": "sql"}):
        assert (await client.get(OPERATIONS, params=bad)).status_code == 400


@pytest.mark.parametrize("op_id", ["never", "a b", "..%2Fx", "x" * 200])
async def test_unknown_operations_are_not_found(client: Client, op_id: str) -> None:
    assert_error(await client.get(f"{OPERATIONS}/{op_id}"), 404, "operation_id")


async def test_a_caller_may_choose_the_operations_id(client: Client, backend: FakeBackend) -> None:
    response = await client.post(LOAD, json=BODY, headers={"idempotency-key": "mine"})
    assert response.headers["x-lorafleet-operation"] == backend.loads[0].op_id == "mine"
    body = {"lora_name": "x"}
    unloaded = await client.post("/v1/unload_lora_adapter", json=body)
    assert unloaded.headers["x-lorafleet-operation"] == backend.unloads[0].op_id != "mine"
    bad = await client.post(LOAD, json=BODY, headers={"idempotency-key": "a b"})
    assert_error(bad, 400, "idempotency-key")


async def test_a_timeout_names_the_operation(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def time_out(load: LoadAdapter) -> None:
        raise OperationTimeoutError(load.name, 180, "it goes on", op_id=load.op_id)

    monkeypatch.setattr(backend, "load_adapter", time_out)
    response = await client.post(LOAD, json=BODY)
    op_id = response.headers["x-lorafleet-operation"]
    assert op_id in assert_error(response, 504, None)["message"]


async def test_every_refusal_is_logged(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    settings = HttpSettings(api_key="user", admin_api_key="admin")
    caplog.set_level(logging.WARNING)
    async with Client(backend, settings) as client:
        for key, expected in (
            ("wrong", "'POST /v1/load_lora_adapter' of anonymous from 127.0.0.1: 401"),
            ("user", "'POST /v1/load_lora_adapter' of api-key from 127.0.0.1: 403"),
            ("admin", "'POST /v1/load_lora_adapter' of admin-key from 127.0.0.1: 400"),
        ):
            caplog.clear()
            headers = {"authorization": f"Bearer {key}"}
            await client.post(LOAD, json={"lora_name": "a\nb", "lora_path": "/x"}, headers=headers)
            (record,) = caplog.records
            assert expected in record.getMessage()
            assert "\n" not in record.getMessage()


async def test_operations_need_the_admin_key(backend: FakeBackend) -> None:
    async with Client(backend, HttpSettings(api_key="user", admin_api_key="admin")) as client:
        for key, status in (("user", 403), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get(OPERATIONS, headers=headers)).status_code == status
