"""The HTTP surface inside Ray Serve: through its proxy, to replicas in other processes."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from deployments.app import bind_app
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig, HttpOptions
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.http_client import assert_error

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = "/v1/completions"
BODY_LIMIT = 10_000


async def make_fake_engine(config: DeploymentConfig, num_threads: int) -> FakeEngine:
    return FakeEngine(token_delay_s=0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def client(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = DeploymentConfig(
        model="fake-model",
        num_replicas=2,
        adapters=AdapterSettings(directories=(str(adapters),), allow_runtime_updating=True),
        cluster=ClusterSettings(
            state_dir=str(tmp_path_factory.mktemp("state")), lease_s=4.0, poll_s=0.2
        ),
        http=HttpOptions(max_body_bytes=BODY_LIMIT),
    )
    port = free_port()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(bind_app(config, make_fake_engine), name="http", route_prefix="/")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def write_adapter(root: Path, name: str, content: str) -> str:
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(content)
    return str(path)


def num_running(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    prefix = "lorafleet_replica_requests_running{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(prefix))


def wait_for_running(client: httpx.Client, count: int) -> None:
    deadline = time.monotonic() + 30
    while (seen := num_running(client)) != count:
        assert time.monotonic() < deadline, f"{seen} running requests, not {count}"
        time.sleep(0.05)


def test_a_completion_with_its_headers(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 3}
    response = client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == "base base base "
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert response.headers["x-lorafleet-adapter-generation"] == "0"
    assert response.headers["x-lorafleet-replica"]


def test_a_stream_ends_with_done(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 20, "stream": True}
    with client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *lines, last = [line for line in response.iter_lines() if line]
    assert last == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["choices"][0]["text"] for event in events) == "base " * 20
    # The first token is sent at once.
    assert events[0]["choices"][0]["text"] == "base "


def test_many_prompts_of_one_request_run_side_by_side(client: httpx.Client) -> None:
    body = {"prompt": ["x"] * 20, "max_tokens": 3}
    response = client.post(COMPLETIONS, json=body)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == ["base base base "] * 20
    assert len(response.headers["x-lorafleet-replica"].split(",")) == 2


def test_errors_keep_their_envelope(client: httpx.Client) -> None:
    assert_error(client.get("/nope"), 404, None)
    assert_error(client.get(COMPLETIONS), 405, None)
    assert_error(client.post(COMPLETIONS, json={"prompt": "x", "n": 0}), 400, "n")
    stream = {"prompt": "x", "model": "nobody", "stream": True}
    assert_error(client.post(COMPLETIONS, json=stream), 404, "model")
    assert_error(client.post(COMPLETIONS, json={"prompt": "x" * BODY_LIMIT}), 413, "body")


def test_a_replaced_adapter_is_seen_by_the_next_request(
    client: httpx.Client, adapters: Path
) -> None:
    path = write_adapter(adapters, "team/sql", "first")
    load = {"lora_name": "team/sql", "lora_path": path}
    assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
    asked = {"model": "team/sql", "prompt": "x"}
    generation = int(client.post(COMPLETIONS, json=asked).headers["x-lorafleet-adapter-generation"])
    write_adapter(adapters, "team/sql", "second")
    load["load_inplace"] = True  # type: ignore[assignment]
    assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
    for _ in range(8):
        response = client.post(COMPLETIONS, json={**asked, "prompt": ["x", "y"]})
        assert int(response.headers["x-lorafleet-adapter-generation"]) > generation
    kept = client.post(COMPLETIONS, json={**asked, "model": f"team/sql@{generation}"})
    assert kept.headers["x-lorafleet-adapter-generation"] == str(generation)
    unknown = client.post(COMPLETIONS, json={**asked, "model": "team/sql@999999"})
    assert_error(unknown, 404, "model")
    (row,) = client.get("/v1/adapters").json()["data"]
    assert row["name"] == "team/sql"
    assert len(row["replicas"]) == 2
    unload = client.post("/v1/unload_lora_adapter", json={"lora_name": "team/sql"})
    assert unload.text == "Success: LoRA adapter 'team/sql' removed successfully."


def served_generation(client: httpx.Client, model: str) -> int:
    response = client.post(COMPLETIONS, json={"model": model, "prompt": ["x", "y"]})
    assert response.status_code == 200, response.text
    return int(response.headers["x-lorafleet-adapter-generation"])


def test_pushed_aliased_rolled_back_and_asked_about(client: httpx.Client) -> None:
    generations = []
    for content in (b"one", b"two"):
        files = {"config": b"{}", "weights": content * 1_000_000}
        pushed = client.put(
            "/v1/adapters/policy", files=files, headers={"idempotency-key": content.decode()}
        )
        assert pushed.status_code == 200, pushed.text
        generations.append(pushed.json()["generation"])
        assert served_generation(client, "policy") == generations[-1]
    first, second = generations
    assert served_generation(client, f"policy@{first}") == first
    alias = client.put("/v1/adapters/aliases/prod", json={"target": f"policy@{first}"})
    assert alias.status_code == 200, alias.text
    assert served_generation(client, "prod") == first
    assert_error(client.delete("/v1/adapters/policy"), 409, "lora_name")
    back = client.post("/v1/adapters/policy/rollback").json()
    assert back["generation"] > second
    assert served_generation(client, "policy") == back["generation"]
    operation = client.get("/v1/adapters/operations/two").json()
    assert (operation["phase"], operation["generation"]) == ("done", second)
    kinds = [each["kind"] for each in client.get("/v1/adapters/operations").json()["data"][:4]]
    assert kinds == ["rollback", "unload", "set_alias", "load"]
    assert client.delete("/v1/adapters/aliases/prod").status_code == 200
    assert client.delete("/v1/adapters/policy").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_replicas(client: httpx.Client, stream: bool) -> None:
    wait_for_running(client, 0)
    body = {"prompt": ["x", "y"], "max_tokens": 100_000, "stream": stream}
    with httpx.Client(base_url=client.base_url, timeout=3) as leaving:
        if stream:
            with leaving.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.iter_lines()
                assert next(lines)
                wait_for_running(client, 2)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(COMPLETIONS, json=body)
    wait_for_running(client, 0)


def test_an_application_that_ends_finishes_its_streams(
    client: httpx.Client, tmp_path: Path
) -> None:
    config = DeploymentConfig(
        model="leaving-model", cluster=ClusterSettings(state_dir=str(tmp_path))
    )
    serve.run(bind_app(config, make_fake_engine), name="leaving", route_prefix="/leaving")
    # A proxy may learn of a new application a moment later.
    deadline = time.monotonic() + 30
    while client.get("/leaving/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    body = {"prompt": "x", "max_tokens": 600, "stream": True}
    with client.stream("POST", f"/leaving{COMPLETIONS}", json=body) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        serve.delete("leaving", _blocking=False)
        deadline = time.monotonic() + 30
        while client.get(f"/leaving{COMPLETIONS}").status_code != 404:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        *rest, done = filter(None, events)
    assert done == "data: [DONE]"
    texts = [json.loads(each.removeprefix("data: "))["choices"][0] for each in rest]
    assert texts[-1]["finish_reason"] == "length"
