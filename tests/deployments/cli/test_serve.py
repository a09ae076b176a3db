"""``lorafleet serve`` becomes ``serve run``, with the settings that were asked for."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli import app
from deployments.cli.serve import fast_path

CHECKOUT = Path(__file__).resolve().parents[3]

Started = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What has been executed instead of this process: commands and environments."""
    calls: Started = []
    monkeypatch.setattr(os, "execve", lambda _, command, env: calls.append((command, env)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return calls


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("", 0)) as server:
        yield server


def test_serve_becomes_serve_run(started: Started) -> None:
    config = CHECKOUT / "serve_config.yaml"
    assert CliRunner().invoke(app, ["serve", str(config)]).exit_code == 0
    assert started[0][0][1:] == ["run", str(config)]
    CliRunner().invoke(app, ["serve", str(config), "--port", "9000"])
    copy = yaml.safe_load(Path(started[1][0][2]).read_text())
    original = yaml.safe_load(config.read_text())
    assert copy["http_options"] == {"host": "127.0.0.1", "port": 9000}
    assert copy["applications"] == original["applications"]


def test_what_the_environment_says_stays(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    CliRunner().invoke(app, ["serve", str(CHECKOUT / "serve_config.yaml")])
    environment = started[0][1]
    assert environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_serve_refuses_what_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("model: x\n")
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "other.yaml")])
    assert result.exit_code == 2 and "applications" in result.output


def test_serves_own_proxy_stays_where_it_is_asked_for_or_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_for = fast_path({"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    assert asked_for["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert fast_path({}) == asked_for


def test_a_second_server_has_ports_of_its_own(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = listener.getsockname()[1]
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    monkeypatch.setitem(fast_path.__globals__, "_HAPROXY_PORTS", {name: taken})
    other = fast_path({})[name]
    assert other != str(taken)
    listener.close()
    assert fast_path({})[name] == str(taken)
