"""The dashboard and the alert rules ask for metrics that exist, and each alert is explained."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deployments.metrics.controller_metrics import ControllerMetrics, FleetView, fleet_gauges
from deployments.metrics.engine_collector import EngineCollector
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.openai.metrics import HttpMetrics
from tests.deployments.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/lorafleet.json").read_text())
GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]

_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
    "gauge": ("",),
}
_METRIC = re.compile(r"\b(?:vllm:|lorafleet_)[a-z0-9_]+")
_LABELS = re.compile(r"\b(vllm:[a-z0-9_]+|lorafleet_[a-z0-9_]+)\{([^}]*)\}")


def registries() -> Iterator[CollectorRegistry]:
    replica = ReplicaMetrics("base", "r1", 100)
    replica.registry.register(EngineCollector(FakeEngine(), "base", "r1", lambda: ()))
    view = FleetView(table_version=0, num_adapters=0, num_aliases=0, num_operations=0)
    yield replica.registry
    yield ControllerMetrics().registry
    yield fleet_gauges(view)
    yield HttpMetrics().registry


@pytest.fixture(scope="module")
def series() -> set[str]:
    return {
        family.name + suffix
        for registry in registries()
        for family in registry.collect()
        for suffix in _SUFFIXES[family.type]
    }


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for alert in ALERTS:
        yield alert["alert"], alert["expr"]


EXPRESSIONS = list(expressions())


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_metric_that_is_asked_for_exists(
    where: str, expression: str, series: set[str]
) -> None:
    asked = set(_METRIC.findall(expression))
    assert asked and asked <= series, asked - series


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_brackets_match(where: str, expression: str) -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)


def test_almost_every_metric_is_on_the_dashboard(series: set[str]) -> None:
    """What is counted and never looked at should not be counted."""
    asked = {name for _, expression in EXPRESSIONS for name in _METRIC.findall(expression)}
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    unseen = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in series} - families
    assert unseen == {
        # For dashboards made for vLLM, and for routers that read its metrics.
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:lora_requests_info",
        # Facts to combine others with.
        "lorafleet_table_version",
        "lorafleet_aliases",
        "lorafleet_kv_blocks",
        "lorafleet_adapters_in_slots",
        "lorafleet_adapter_resident",
        "lorafleet_replica_requests_running",
        "lorafleet_replica_requests_waiting",
    }


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_every_alert_has_its_section_in_the_runbook(alert: dict[str, Any]) -> None:
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor == alert["alert"].lower()
    assert alert["alert"] in headings
    assert alert["labels"]["severity"] in ("warning", "critical")


def test_labels_that_alerts_select_by_have_such_values(series: set[str]) -> None:
    for alert in ALERTS:
        for metric, labels in _LABELS.findall(alert["expr"]):
            assert metric in series
            assert re.fullmatch(r'(status|outcome)=~"[a-z0-9.|]+"', labels), labels


def test_the_documentation_names_every_metric_and_no_other(series: set[str]) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    named = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in _METRIC.findall(page)}
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in series}
    assert families - named == set()
    assert named - families - {"lorafleet_http_"} == set()
