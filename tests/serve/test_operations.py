"""What operators see and do, on a deployment of several processes."""

import json
import time
from collections.abc import Generator
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from deployments.cli import app
from tests.serve.conftest import DemoServer

MODEL = "smollm2-135m-instruct"
# A replica tells its figures when it renews its lease, every two seconds.
_PATIENCE_S = 20


def samples(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    text = httpx.get(f"{url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def lorafleet(server: DemoServer, *args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["adapters", *args, "--url", server.url, "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.output)
    return document


def first_events(url: str) -> Generator[dict[str, Any], None, None]:
    with httpx.stream("GET", f"{url}/admin/events", timeout=30) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_metrics_of_all_replicas_come_from_one_address(
    demo_server: DemoServer, client: openai.OpenAI
) -> None:
    for _ in range(4):
        client.completions.create(model="pirate", prompt="Ahoy", max_tokens=4)
    deadline = time.monotonic() + _PATIENCE_S
    count = 0.0
    while count < 4 and time.monotonic() < deadline:
        time.sleep(0.5)
        found = samples(demo_server.url)
        served = found.get("lorafleet_adapter_requests_total", [])
        count = sum(value for labels, value in served if labels["adapter"] == "pirate")
    assert count >= 4
    assert found["lorafleet_replicas"] == [({}, 2.0)]
    engines = {labels["engine"] for labels, _ in found["vllm:num_requests_running"]}
    assert len(engines) == 2
    assert {labels["model_name"] for labels, _ in found["vllm:kv_cache_usage_perc"]} == {MODEL}
    assert sum(value for _, value in found["vllm:e2e_request_latency_seconds_count"]) >= 4
    assert sum(value for _, value in found["vllm:generation_tokens_total"]) >= 16
    loads = found["lorafleet_cold_load_seconds_count"]
    assert sum(value for labels, value in loads if labels["outcome"] == "loaded") >= 1
    backends = {labels["backend"] for labels, _ in found["lorafleet_resolver_seconds_count"]}
    assert "filesystem" in backends
    assert all(value == 0 for _, value in found["lorafleet_replica_journal_lag"])


def test_the_command_line_loads_replaces_rolls_back_and_unloads(demo_server: DemoServer) -> None:
    name = "from-the-command-line"
    first = demo_server.copy_adapter("sql", "cli-v1")
    second = demo_server.copy_adapter("haiku", "cli-v2")
    loaded = lorafleet(demo_server, "load", name, str(first))
    replaced = lorafleet(demo_server, "replace", name, str(second))
    assert replaced["generation"] > loaded["generation"]
    back = lorafleet(demo_server, "rollback", name)
    assert back["digest"] == loaded["digest"]
    shown = lorafleet(demo_server, "show", name)
    assert len(shown["replicas"]) == 2 and shown["generation"] == back["generation"]
    lorafleet(demo_server, "alias", "set", "cli-alias", name)
    lorafleet(demo_server, "alias", "delete", "cli-alias")
    lorafleet(demo_server, "unload", name)
    done = lorafleet(demo_server, "operations", "--name", name)["data"]
    assert {operation["kind"] for operation in done} >= {"load", "rollback", "unload"}


def test_the_admin_page_is_served_and_follows_the_fleet(demo_server: DemoServer) -> None:
    page = httpx.get(f"{demo_server.url}/admin", timeout=30)
    assert page.status_code == 200 and "admin/app.js" in page.text
    events = first_events(demo_server.url)
    assert next(events)["base_model"] == MODEL
    fleet = next(event for event in events if event.get("full"))
    assert len(fleet["replicas"]) == 2
    events.close()
