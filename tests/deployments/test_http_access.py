"""Keys with adapters and limits of their own, as clients meet them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from deployments.access.limiter import Limiter
from deployments.errors import OverloadedError
from deployments.http_app import create_http_app
from deployments.openai.settings import HttpSettings
from tests.deployments.asgi_connection import Connection, until
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

COMPLETIONS = "/v1/completions"
TEAM, ADMIN, BUSY = "sk-team-0123456789", "sk-admin-0123456789", "sk-busy-0123456789"
KEYS = f"""
keys:
- name: team
  secrets: [{TEAM}]
  adapters: ["team/*", base]
  limits: {{requests_per_minute: 5, tokens_per_minute: 1000}}
- name: root
  secrets: [{ADMIN}]
  role: admin
- name: busy
  secrets: [{BUSY}]
  limits: {{concurrent_requests: 2}}
adapter_limits:
- adapters: "team/*"
  limits: {{requests_per_minute: 2}}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend()
    for name in ("team/sql", "team/law", "other"):
        backend.register(name)
    return backend


@pytest.fixture
def settings(tmp_path: Path) -> HttpSettings:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return HttpSettings(keys_file=path)


@pytest_asyncio.fixture
async def client(backend: FakeBackend, settings: HttpSettings) -> AsyncIterator[Client]:
    async with Client(backend, settings) as client:
        yield client


async def complete(client: Client, key: str, **body: object) -> httpx.Response:
    return await client.post(COMPLETIONS, json={"prompt": "x", **body}, headers=bearer(key))


async def test_a_key_is_needed_and_one_of_the_file_or_the_settings_will_do(
    backend: FakeBackend, settings: HttpSettings
) -> None:
    both = HttpSettings(keys_file=settings.keys_file, api_key="single")
    async with Client(backend, both) as client:
        assert_error(await client.post(COMPLETIONS, json={"prompt": "x"}), 401, None)
        for wrong in ("", "sk-team", TEAM + "x", TEAM.upper(), f"{TEAM} {TEAM}", "k\u00e9y"):
            headers = {"authorization": f"Bearer {wrong}".encode()}
            response = await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
            assert_error(response, 401, None)
        for key in (TEAM, ADMIN, BUSY, "single"):
            assert (await complete(client, key)).status_code == 200


async def test_models_that_a_key_is_not_for_are_forbidden_by_name_and_not_listed(
    client: Client, backend: FakeBackend
) -> None:
    for model in ("other", "base:other", "other@1", "nowhere"):
        error = assert_error(await complete(client, TEAM, model=model), 403, "model")
        assert model.removeprefix("base:").partition("@")[0] in error["message"]
        assert error["type"] == "PermissionDeniedError"
    assert backend.requests == []
    for path in ("/v1/models/other", "/v1/adapters/other", "/v1/adapters/aliases/other"):
        assert_error(await client.get(path, headers=bearer(TEAM)), 403, "model")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        asked = {**body, "model": "other"}
        assert_error(await client.post(path, json=asked, headers=bearer(TEAM)), 403, "model")

    async def listed(path: str, key: str, field: str) -> list[str]:
        response = await client.get(path, headers=bearer(key))
        return [each[field] for each in response.json()["data"]]

    assert await listed("/v1/models", TEAM, "id") == ["base", "team/law", "team/sql"]
    assert await listed("/v1/models", BUSY, "id") == ["base", "other", "team/law", "team/sql"]
    assert await listed("/v1/models?limit=1&after=base", TEAM, "id") == ["team/law"]
    assert await listed("/v1/adapters?limit=1", TEAM, "name") == ["team/law"]
    assert await listed("/v1/adapters?after=team/law", TEAM, "name") == ["team/sql"]


async def test_only_an_administrators_key_changes_adapters(client: Client) -> None:
    body = {"lora_name": "new", "lora_path": "/new"}
    for key, status in ((TEAM, 403), (BUSY, 403), ("wrong", 401), (ADMIN, 200)):
        response = await client.post("/v1/load_lora_adapter", json=body, headers=bearer(key))
        assert response.status_code == status


async def test_limits_answer_429_with_openais_headers(client: Client) -> None:
    responses = [await complete(client, TEAM, model="team/sql") for _ in range(3)]
    assert [each.status_code for each in responses] == [200, 200, 429]
    error = assert_error(responses[2], 429, None)
    assert error["type"] == "RateLimitError"
    assert "model team/sql: requests_per_minute 2" in error["message"]
    assert 1 <= int(responses[2].headers["retry-after"]) <= 61
    for response, left in zip(responses, ("1", "0", "0"), strict=True):
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == left
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        assert response.headers["x-ratelimit-limit-tokens"] == "1000"
    # Each adapter has its own account, the key has one for all.
    assert [(await complete(client, TEAM, model="team/law")).status_code for _ in range(2)] == [
        200,
        200,
    ]
    assert (await complete(client, TEAM)).status_code == 200
    assert "key team: requests_per_minute 5" in (await complete(client, TEAM)).text
    metrics = (await client.get("/metrics")).text
    assert 'lorafleet_http_refusals_total{reason="requests_per_minute"} 2.0' in metrics


async def test_tokens_are_counted_as_used_not_as_asked_for(client: Client) -> None:
    response = await complete(client, TEAM, max_tokens=900)
    assert response.json()["usage"]["total_tokens"] == 13
    assert response.headers["x-ratelimit-remaining-tokens"] == "99"
    response = await complete(client, TEAM, max_tokens=900)
    assert response.headers["x-ratelimit-remaining-tokens"] == "86"
    error = assert_error(await complete(client, TEAM, max_tokens=980), 429, None)
    assert "tokens_per_minute 1000" in error["message"]


async def test_the_official_client_waits_as_long_as_it_is_told(
    backend: FakeBackend, settings: HttpSettings
) -> None:
    transport = httpx.ASGITransport(app=create_http_app(backend, settings))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key=TEAM,
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        for _ in range(5):
            await client.completions.create(model="base", prompt="x")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="base", prompt="x")
        assert int(caught.value.response.headers["retry-after"]) > 0
        with pytest.raises(openai.PermissionDeniedError, match="other"):
            await client.completions.create(model="other", prompt="x")
        models = await client.models.list()
        assert [each.id for each in models.data] == ["base", "team/law", "team/sql"]


async def test_places_are_given_back_on_every_way_out(
    backend: FakeBackend, settings: HttpSettings
) -> None:
    """Finished, refused, failed early, failed midway, left before and during the answer."""
    app = create_http_app(backend, settings)
    limiter = app.state.access.limiter
    assert isinstance(limiter, Limiter)
    headers = [(b"authorization", f"Bearer {BUSY}".encode())]

    async def run(body: Json, *, leaves: bool = False, broken: bool = False) -> None:
        connection = Connection(app, body, headers=headers, broken=broken)
        if leaves:
            await until(lambda: len(backend.requests) > num_before)
            connection.leave()
        async with asyncio.timeout(10):
            await asyncio.gather(connection.task, return_exceptions=True)

    for stream in (False, True):
        for body in ({"prompt": "x"}, {"prompt": ["x", "y"], "n": 3}):
            asked = {**body, "stream": stream}
            await run(asked)
            await run({**asked, "model": "nowhere"})
            await run({**asked, "max_tokens": -1})
            await run({**asked, "stop": [""]})
            await run({**asked, "prompt": "x" * 100})
            await run(asked, broken=True)
            backend.fail_at_start = OverloadedError("full")
            await run(asked)
            backend.fail_at_start = RuntimeError("defect")
            await run(asked)
            backend.fail_at_start, backend.fail_after_first_item = None, RuntimeError("defect")
            await run(asked)
            backend.fail_after_first_item = None
            for before_start in (False, True):
                backend.gate, backend.gate_before_start = asyncio.Event(), before_start
                num_before = len(backend.requests)
                await run(asked, leaves=True)
                connection = Connection(app, asked, headers=headers)
                await until(lambda: limiter.num_running > 0)
                for _ in range(num_before % 7):
                    await asyncio.sleep(0)
                connection.task.cancel()
                await asyncio.gather(connection.task, return_exceptions=True)
                backend.gate, backend.gate_before_start = None, False
            assert limiter.num_running == 0


async def test_no_more_run_at_once_than_the_limit(client: Client, backend: FakeBackend) -> None:
    backend.gate = asyncio.Event()
    waiting = [
        asyncio.ensure_future(complete(client, BUSY, stream=index % 2 == 0)) for index in range(20)
    ]
    await until(lambda: sum(task.done() for task in waiting) == 18)
    await until(lambda: len(backend.requests) == 2)
    backend.gate.set()
    statuses = sorted([(await task).status_code for task in waiting])
    assert statuses == [200] * 2 + [429] * 18
    assert (await complete(client, BUSY)).status_code == 200


async def test_no_secret_is_in_logs_errors_or_metrics(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = [await complete(client, key) for key in (TEAM, ADMIN, BUSY, TEAM + "x")]
    answers += [await complete(client, TEAM, model="other")]
    answers += [await complete(client, TEAM) for _ in range(6)]
    body = {"lora_name": "new", "lora_path": "/new"}
    answers += [await client.post("/v1/load_lora_adapter", json=body, headers=bearer(TEAM))]
    answers += [await client.get("/metrics")]
    told = [answer.text + str(answer.headers) for answer in answers] + [caplog.text]
    assert {answer.status_code for answer in answers} == {200, 401, 403, 429}
    for secret in (TEAM, ADMIN, BUSY):
        assert not [each for each in told if secret in each]
