"""Loading, unloading and listing adapters, keys, and the routes for operators."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from deployments.aliases import AliasTarget
from deployments.backend import LoadAdapter, SetAlias
from deployments.errors import AdapterRejectedError
from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def load(client: Client, name: str, path: str = "/adapters/x", **more: object) -> Json:
    return (await client.post(LOAD, json={"lora_name": name, "lora_path": path, **more})).json()


async def test_load_then_unload_answer_in_plain_text(client: Client, backend: FakeBackend) -> None:
    loaded = await client.post(LOAD, json={"lora_name": "x1", "lora_path": "/adapters/x1"})
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'x1' added successfully."
    expected = LoadAdapter(
        name="x1",
        source="/adapters/x1",
        requested_by="anonymous",
        requested_from="127.0.0.1",
        op_id=loaded.headers["x-lorafleet-operation"],
    )
    assert backend.loads == [expected]
    unloaded = await client.post(UNLOAD, json={"lora_name": "x1", "force": True, "timeout_s": 2})
    assert unloaded.status_code == 200
    assert unloaded.text == "Success: LoRA adapter 'x1' removed successfully."
    assert (backend.unloads[0].force, backend.unloads[0].timeout_s) == (True, 2)


async def test_loading_twice_needs_load_inplace(client: Client, backend: FakeBackend) -> None:
    body = {"lora_name": "x1", "lora_path": "/adapters/x1"}
    await client.post(LOAD, json=body)
    again = await client.post(LOAD, json=body)
    error = assert_error(again, 400, "lora_name")
    assert error["type"] == "InvalidUserInput"
    assert error["message"] == (
        "The lora adapter 'x1' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    replaced = await client.post(LOAD, json={**body, "load_inplace": True, "pin": True})
    assert replaced.status_code == 200
    assert (backend.loads[-1].load_inplace, backend.loads[-1].pin) == (True, True)


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"lora_path": "/x"}, 400, "BadRequestError", "body.lora_name"),
        ({"lora_name": "x"}, 400, "BadRequestError", "body.lora_path"),
        ({"lora_name": 5, "lora_path": "/x"}, 400, "BadRequestError", "body.lora_name"),
        ({"lora_name": "x", "lora_path": ["/x"]}, 400, "BadRequestError", "body.lora_path"),
        ({"lora_name": "", "lora_path": ""}, 400, "InvalidUserInput", None),
        ({"lora_name": "x", "lora_path": ""}, 400, "InvalidUserInput", None),
        ({"lora_name": "x", "lora_path": "/nope"}, 404, "NotFoundError", "lora_path"),
        ({"lora_name": "base", "lora_path": "/x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "../x", "lora_path": "/x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "a b", "lora_path": "/x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "a@1", "lora_path": "/x"}, 400, "InvalidUserInput", "lora_name"),
        ({"lora_name": "x" * 129, "lora_path": "/x"}, 400, "InvalidUserInput", "lora_name"),
    ],
)
async def test_bad_loads(
    client: Client, backend: FakeBackend, body: Json, status: int, kind: str, param: str | None
) -> None:
    error = assert_error(await client.post(LOAD, json=body), status, param)
    assert error["type"] == kind
    assert not backend.adapters


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({}, 400, "BadRequestError", "body.lora_name"),
        ({"lora_name": ""}, 400, "InvalidUserInput", None),
        ({"lora_name": "nope"}, 404, "NotFoundError", "lora_name"),
        ({"lora_name": "../x"}, 404, "NotFoundError", "lora_name"),
        ({"lora_name": "x", "timeout_s": 0}, 400, "BadRequestError", "body.timeout_s"),
    ],
)
async def test_bad_unloads(
    client: Client, body: Json, status: int, kind: str, param: str | None
) -> None:
    error = assert_error(await client.post(UNLOAD, json=body), status, param)
    assert error["type"] == kind


async def test_unknown_adapter_is_named_when_unloaded(client: Client) -> None:
    error = (await client.post(UNLOAD, json={"lora_name": "x9"})).json()["error"]
    assert error["message"] == "The lora adapter 'x9' cannot be found."


async def test_a_rejection_tells_the_replicas_reasons(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reject(_: LoadAdapter) -> None:
        raise AdapterRejectedError("x", {"r1": "rank 512 is too large", "r2": "disk full"})

    monkeypatch.setattr(backend, "load_adapter", reject)
    message = (await load(client, "x"))["error"]["message"]
    assert "rank 512 is too large" in message
    assert "disk full" in message


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_without_runtime_updating_the_routes_are_not_found_but_say_why(
    backend: FakeBackend, path: str
) -> None:
    backend.allow_runtime_updating = False
    async with Client(backend) as client:
        response = await client.post(path, json={"lora_name": "x", "lora_path": "/x"})
    error = assert_error(response, 404, None)
    assert "LORAFLEET_ALLOW_RUNTIME_LORA_UPDATING=1" in error["message"]
    assert not backend.loads


async def test_adapter_matrix(client: Client, backend: FakeBackend) -> None:
    backend.register("team/sql", generation=4)
    document = (await client.get("/v1/adapters")).json()
    (row,) = document["data"]
    assert row == (await client.get("/v1/adapters/team/sql")).json()
    assert row == {
        "object": "adapter",
        "name": "team/sql",
        "generation": 4,
        "digest": "d" * 64,
        "source": "file:///adapters/team/sql",
        "state": "ready",
        "pinned": False,
        "base_model": "base",
        "rank": 8,
        "size_bytes": 1000,
        "created_at": 1700000000.5,
        "created_by": "",
        "replicas": [
            {
                "replica_id": "replica-1",
                "generation": 4,
                "host": True,
                "slot": None,
                "num_running": 0,
            }
        ],
        "kept": [],
    }
    assert document["replicas"][0]["replica_id"] == "replica-1"


@pytest.mark.parametrize("name", ["nope", "..%2Fx", "%00", "x" * 200])
async def test_unknown_adapters_and_models_are_not_found(client: Client, name: str) -> None:
    for path in ("/v1/adapters/", "/v1/models/"):
        assert_error(await client.get(path + name), 404, "model")


async def test_model_cards(client: Client, backend: FakeBackend) -> None:
    backend.register("team/sql")
    document = (await client.get("/v1/models")).json()
    assert document["object"] == "list"
    base, adapter = document["data"]
    assert base == {
        "id": "base",
        "object": "model",
        "created": 1700000000,
        "owned_by": "lorafleet",
        "root": "/models/base",
        "parent": None,
        "max_model_len": 64,
        "permission": [],
    }
    assert adapter == {
        **base,
        "id": "team/sql",
        "root": "file:///adapters/team/sql",
        "parent": "base",
    }
    assert (await client.get("/v1/models/base")).json() == base
    assert (await client.get("/v1/models/team/sql")).json() == adapter
    assert (await client.get("/v1/models/base:team/sql")).json() == adapter


async def test_pages_of_models_hold_each_of_them_once(client: Client, backend: FakeBackend) -> None:
    for name in ("c", "a", "team/b"):
        backend.register(name)
    targets = (AliasTarget(adapter="a", weight=1),)
    for name in ("b", "z"):
        await backend.set_alias(SetAlias(name=name, targets=targets))
    whole = (await client.get("/v1/models")).json()
    ids = [card["id"] for card in whole["data"]]
    assert ids == ["base", "a", "b", "c", "team/b", "z"]
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == ("base", "z", False)
    for limit in range(1, 8):
        listed: list[Json] = []
        page: Json = {"has_more": True}
        while page["has_more"]:
            query = {"limit": limit} | ({"after": page["last_id"]} if listed else {})
            page = (await client.get("/v1/models", params=query)).json()
            assert 1 <= len(page["data"]) <= limit
            listed += page["data"]
        assert listed == whole["data"]
    past = (await client.get("/v1/models", params={"after": "zz"})).json()
    assert past == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    for limit in ("0", "x", "10001"):
        response = await client.get("/v1/models", params={"limit": limit})
        assert response.status_code == 400


async def test_tokenize_and_detokenize(client: Client, backend: FakeBackend) -> None:
    backend.register("sql")
    text = await client.post("/tokenize", json={"model": "sql", "prompt": "ab"})
    assert text.json() == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [97, 98],
        "token_strs": None,
    }
    messages = [{"role": "user", "content": "ab"}]
    chat = await client.post("/tokenize", json={"messages": messages, "return_token_strs": True})
    assert chat.json()["token_strs"] == ["a", "b"]
    back = await client.post("/detokenize", json={"tokens": [97, 98]})
    assert back.json() == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "body.prompt"),
        ("/tokenize", {"prompt": 5}, 400, "body.prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "../x"}, 404, "model"),
        ("/detokenize", {"tokens": ["x"]}, 400, "body.tokens.0"),
        ("/detokenize", {"tokens": [-1]}, 400, "body.tokens.0"),
        ("/detokenize", {"tokens": [5000]}, 400, "body.tokens"),
    ],
)
async def test_bad_tokenizations(
    client: Client, path: str, body: Json, status: int, param: str
) -> None:
    assert_error(await client.post(path, json=body), status, param)


async def test_health_follows_the_backend(client: Client, backend: FakeBackend) -> None:
    healthy = await client.get("/health")
    assert (healthy.status_code, healthy.content) == (200, b"")
    backend.healthy_now = False
    assert (await client.get("/health")).status_code == 503


async def test_version(client: Client) -> None:
    assert (await client.get("/version")).json()["version"]


async def test_metrics_count_requests_and_show_residency(
    client: Client, backend: FakeBackend
) -> None:
    backend.register("sql", generation=3)
    await client.post("/v1/completions", json={"prompt": "x"})
    await client.post("/v1/completions", json={})
    await client.get("/some/path/of/a/scanner")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = set(response.text.splitlines())
    assert {
        'lorafleet_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'lorafleet_http_requests_total{route="/v1/completions",status="400"} 1.0',
        'lorafleet_http_requests_total{route="other",status="404"} 1.0',
        'lorafleet_adapter_generation{adapter="sql"} 3.0',
        'lorafleet_adapter_resident{adapter="sql",replica="replica-1",tier="host"} 1.0',
        'lorafleet_adapter_resident{adapter="sql",replica="replica-1",tier="slot"} 0.0',
        'lorafleet_replica_requests_running{replica="replica-1"} 1.0',
    } <= lines


USER = "Bearer user"
ADMIN = "Bearer admin"
BAD_KEYS = [None, "", "user", "Basic user", "Bearer", "Bearer wrong", "Bearer \xe9"]


async def call(client: Client, path: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"authorization": key.encode("latin-1")}
    if path == LOAD:
        body = {"lora_name": "x", "lora_path": "/x", "load_inplace": True}
        return await client.post(path, json=body, headers=headers)
    return await client.get(path, headers=headers)


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_user_key_guards_user_and_admin_routes(backend: FakeBackend, key: str | None) -> None:
    async with Client(backend, HttpSettings(api_key="user")) as client:
        for path in ("/v1/models", "/v1/adapters", LOAD):
            response = await call(client, path, key)
            assert_error(response, 401, None)
            assert response.headers["www-authenticate"] == "Bearer"
            assert (await call(client, path, "bearer user")).status_code == 200
        for path in ("/health", "/version", "/metrics"):
            assert (await call(client, path, None)).status_code == 200


async def test_admin_key_guards_admin_routes_and_opens_all(backend: FakeBackend) -> None:
    settings = HttpSettings(api_key="user", admin_api_key="admin")
    async with Client(backend, settings) as client:
        assert_error(await call(client, LOAD, USER), 403, None)
        assert_error(await call(client, LOAD, None), 401, None)
        assert (await call(client, LOAD, ADMIN)).status_code == 200
        assert backend.loads[-1].requested_by == "admin-key"
        assert (await call(client, "/v1/models", USER)).status_code == 200
        assert (await call(client, "/v1/models", ADMIN)).status_code == 200


async def test_admin_key_alone_leaves_user_routes_open(backend: FakeBackend) -> None:
    async with Client(backend, HttpSettings(admin_api_key="admin")) as client:
        assert (await call(client, "/v1/models", None)).status_code == 200
        assert_error(await call(client, LOAD, None), 401, None)
        assert (await call(client, LOAD, ADMIN)).status_code == 200


async def test_keys_are_checked_before_the_body(backend: FakeBackend) -> None:
    async with Client(backend, HttpSettings(api_key="user")) as client:
        assert_error(await client.post("/v1/completions", content=b"{"), 401, None)


def test_an_empty_key_is_a_mistake_not_an_open_door() -> None:
    with pytest.raises(ValueError, match="api_key"):
        HttpSettings(api_key="")
