"""``lorafleet adapters`` against the HTTP application over a socket."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from adapters import AdapterVersion
from deployments.aliases import AliasTarget
from deployments.cli import app
from deployments.cli.admin_client import AdminClient, LostAnswerError
from deployments.cli.operation_progress import describe
from deployments.errors import ReplicaUnavailableError
from deployments.http_app import create_http_app
from deployments.openai.settings import HttpSettings
from deployments.operations import (
    Operation,
    OperationKind,
    OperationPhase,
    OperationStatus,
    ReplicaPhase,
    ReplicaProgress,
)
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import serving

Run = Callable[..., Result]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def run(backend: FakeBackend) -> Iterator[Run]:
    with serving(create_http_app(backend)) as url:

        def run(*args: str) -> Result:
            environment = {"LORAFLEET_URL": url, "COLUMNS": "200"}
            return CliRunner().invoke(app, ["adapters", *args], env=environment)

        yield run


def test_load_sends_what_was_asked(run: Run, backend: FakeBackend) -> None:
    result = run("load", "sql", "/models/sql", "--pin")
    assert result.exit_code == 0, result.output
    assert "loaded sql: generation 1" in result.output
    [load] = backend.loads
    assert (load.name, load.source, load.pin, load.load_inplace) == (
        "sql",
        "/models/sql",
        True,
        False,
    )
    assert load.op_id


def test_loading_a_name_in_use_is_refused_and_replace_is_not(
    run: Run, backend: FakeBackend
) -> None:
    backend.register("sql")
    refused = run("load", "sql", "/models/sql")
    assert refused.exit_code == 1
    assert "has already been loaded" in refused.output
    assert run("replace", "sql", "/models/sql").exit_code == 0
    assert backend.loads[-1].load_inplace


def test_list_shows_every_page_as_a_table_and_as_json(run: Run, backend: FakeBackend) -> None:
    for number in range(1003):
        backend.register(f"adapter-{number:04}")
    listed = json.loads(run("list", "--json").output)
    assert [a["name"] for a in listed["data"]] == sorted(backend.adapters)
    assert not listed["has_more"]
    some = run("list", "--prefix", "adapter-000", "--limit", "2")
    assert "adapter-0001" in some.output and "adapter-0002" not in some.output
    assert "1/1" in some.output


def test_list_of_nothing_says_so(run: Run) -> None:
    assert run("list").output == "no adapters\n"


def test_show_names_replicas_and_earlier_versions(run: Run, backend: FakeBackend) -> None:
    backend.register("sql", 7)
    backend.kept["sql"] = [_version("sql", 5)]
    output = run("show", "sql").output
    for text in ("replica-1", "file:///adapters/sql", "d" * 64, "kept generation", "5"):
        assert text in output
    missing = run("show", "other")
    assert missing.exit_code == 1 and "404" in missing.output


def test_unload_pin_and_rollback_reach_the_server(run: Run, backend: FakeBackend) -> None:
    backend.register("sql", 7)
    backend.kept["sql"] = [_version("sql", 5)]
    assert run("pin", "sql").exit_code == 0
    assert backend.adapters["sql"].pinned
    assert run("pin", "sql", "--off").exit_code == 0
    assert not backend.adapters["sql"].pinned
    assert "generation 8" in run("rollback", "sql", "--generation", "5").output
    assert backend.rollbacks[0].generation == 5
    assert run("unload", "sql", "--force", "--timeout", "3").exit_code == 0
    assert (backend.unloads[0].force, backend.unloads[0].timeout_s) == (True, 3.0)
    assert "sql" not in backend.adapters


def test_names_with_slashes_stay_whole(run: Run, backend: FakeBackend) -> None:
    backend.register("team/sql", 2)
    assert json.loads(run("show", "team/sql", "--json").output)["name"] == "team/sql"


def test_alias_takes_one_target_or_shares(run: Run, backend: FakeBackend) -> None:
    assert run("alias", "set", "prod", "sql@7=95", "sql=5").exit_code == 0
    assert backend.aliases["prod"].targets == (AliasTarget("sql@7", 95.0), AliasTarget("sql", 5.0))
    assert "sql@7 (95.0%), sql (5.0%)" in run("alias", "list").output
    assert run("alias", "set", "prod", "sql").exit_code == 0
    assert run("alias", "delete", "prod").output == "forgot prod\n"
    assert backend.aliases == {}


@pytest.mark.parametrize("targets", [("sql", "csv"), ("sql=1", "sql=2"), ("sql=x",)])
def test_alias_refuses_what_has_no_one_meaning(run: Run, targets: tuple[str, ...]) -> None:
    assert run("alias", "set", "prod", *targets).exit_code == 2


def test_push_sends_the_files(run: Run, backend: FakeBackend, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    assert run("push", "sql", str(tmp_path)).exit_code == 0
    _, files = backend.pushes[0]
    assert files == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


def test_push_leaves_nothing_behind_silently(
    run: Run, backend: FakeBackend, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    result = run("push", "sql", str(tmp_path))
    assert result.exit_code == 2 and "chat_template.jinja" in result.output
    assert backend.pushes == []


def test_operations_are_listed_and_shown_by_replica(run: Run, backend: FakeBackend) -> None:
    backend.operations["op-1"] = _operation()
    listed = run("operations", "--name", "sql", "--phase", "aborted")
    assert "op-1" in listed.output and "no room" in listed.output
    assert (backend.operation_queries[0].name, backend.operation_queries[0].phase) == (
        "sql",
        "aborted",
    )
    shown = run("operations", "op-1").output
    assert "replica-1" in shown and "rejected" in shown


def test_keys_come_from_the_environment(backend: FakeBackend) -> None:
    settings = HttpSettings(admin_api_key="secret")
    with serving(create_http_app(backend, settings)) as url:
        command = ["adapters", "load", "sql", "/models/sql", "--url", url]
        assert CliRunner().invoke(app, command).exit_code == 1
        environment = {"LORAFLEET_ADMIN_API_KEY": "secret"}
        assert CliRunner().invoke(app, command, env=environment).exit_code == 0
    assert backend.loads[0].requested_by == "admin-key"


def test_no_server_is_another_exit_status_than_a_refusal() -> None:
    result = CliRunner().invoke(app, ["adapters", "list", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 3
    assert "no answer from http://127.0.0.1:1" in result.output


def test_a_server_error_is_not_a_refusal(
    run: Run, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ReplicaUnavailableError("no replica")

    monkeypatch.setattr(backend, "load_adapter", fail)
    result = run("load", "sql", "/models/sql")
    assert result.exit_code == 3 and "503" in result.output


def test_a_lost_answer_is_asked_for_again_under_the_same_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    def send(_client: AdminClient, *_: object, op_id: str, **__: object) -> dict[str, Any]:
        sent.append(op_id)
        if len(sent) < 3:
            raise LostAnswerError
        return {"name": "sql"}

    monkeypatch.setattr(AdminClient, "_send", send)
    monkeypatch.setattr("time.sleep", lambda _: None)
    answer = AdminClient("http://nowhere", None).change("POST", "/v1/adapters", op_id="one")
    assert (answer, sent) == ({"name": "sql"}, ["one"] * 3)


def test_progress_counts_replicas_that_are_through() -> None:
    operation = {
        "kind": "load",
        "name": "sql",
        "phase": "preparing",
        "replicas": [{"phase": "prepared"}, {"phase": "preparing"}, {"phase": "rejected"}],
    }
    assert describe(operation) == ("load sql: preparing", 1, 3)


def _version(name: str, generation: int) -> AdapterVersion:
    return AdapterVersion(
        name=name,
        generation=generation,
        digest="e" * 64,
        source_uri=f"file:///earlier/{name}",
        base_model="base",
        rank=8,
        size_bytes=1000,
    )


def _operation() -> OperationStatus:
    return OperationStatus(
        operation=Operation(
            op_id="op-1",
            kind=OperationKind.LOAD,
            name="sql",
            phase=OperationPhase.ABORTED,
            started_at=1700000000.0,
            detail="no room",
        ),
        replicas=(
            ReplicaProgress(
                replica_id="replica-1", phase=ReplicaPhase.REJECTED, reason="no room here"
            ),
        ),
    )
