"""PUT /v1/adapters/{name}: files in the body, streamed to disk within limits."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Client, assert_error

URL = "/v1/adapters/team/policy"
WEIGHTS = bytes(range(256)) * 20_000  # with newlines and dashes, in several chunks
FILES = {"config": ("c.json", b"{}"), "weights": ("w.safetensors", WEIGHTS)}
LIMIT = 6_000_000


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend, HttpSettings(max_push_bytes=LIMIT)) as client:
        yield client


async def test_files_arrive_as_they_were_sent(client: Client, backend: FakeBackend) -> None:
    headers = {"idempotency-key": "step-1"}
    response = await client.put(URL, files=FILES, params={"pin": "true"}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["generation"] == 1
    assert response.json()["digest"] == "d" * 64
    ((push, files),) = backend.pushes
    assert files == {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
    assert (push.name, push.pin, push.op_id) == ("team/policy", True, "step-1")
    assert not backend.receiving[0].exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config": FILES["config"]}, "'weights'"),
        ({"weights": FILES["weights"]}, "'config'"),
        ({**FILES, "more": ("x", b"x")}, "'more'"),
        ({**FILES, "../../x": ("x", b"x")}, "not '../../x'"),
        ([("config", FILES["config"])] * 2, "not 'config'"),
    ],
)
async def test_other_parts_are_refused(
    client: Client, backend: FakeBackend, files: object, says: str
) -> None:
    response = await client.put(URL, files=files)  # type: ignore[arg-type]
    assert says in assert_error(response, 400, "body")["message"]
    assert not backend.pushes
    assert not backend.receiving[0].exists()


async def test_the_size_is_bounded_announced_or_not(client: Client, backend: FakeBackend) -> None:
    big = {**FILES, "weights": ("w", bytes(LIMIT))}
    assert_error(await client.put(URL, files=big), 413, "body")
    request = client.build_request("PUT", URL, files=big)
    body = request.read()

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks():
            yield chunk

    headers = {"content-type": request.headers["content-type"]}
    assert_error(await client.put(URL, content=stream(), headers=headers), 413, "body")
    assert not backend.pushes


@pytest.mark.parametrize(
    ("content_type", "content", "param"),
    [
        ("application/json", b"{}", None),
        ("multipart/form-data", b"x", None),
        ("multipart/form-data; boundary=x", b"nonsense", "body"),
        ("multipart/form-data; boundary=x", b"", "body"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="config"\r\n\r\n{}',
            "body",
        ),
        ("multipart/form-data; boundary=x", b"--x\r\na: " + b"b" * 10_000, "body"),
    ],
)
async def test_malformed_bodies(
    client: Client, backend: FakeBackend, content_type: str, content: bytes, param: str | None
) -> None:
    response = await client.put(URL, content=content, headers={"content-type": content_type})
    assert_error(response, 400, param)
    assert not backend.pushes


async def test_bad_names_are_refused_before_anything_is_received(
    client: Client, backend: FakeBackend
) -> None:
    assert_error(await client.put("/v1/adapters/a@1", files=FILES), 400, "lora_name")
    assert not backend.receiving


async def test_pushes_need_the_admin_key_and_the_permission(backend: FakeBackend) -> None:
    settings = HttpSettings(api_key="user", admin_api_key="admin")
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    async with Client(backend, settings) as client:
        assert_error(await client.put(URL, files=FILES, headers=user), 403, None)
        backend.allow_runtime_updating = False
        assert_error(await client.put(URL, files=FILES, headers=admin), 404, None)
