"""State moves between journals, by functions and by ``lorafleet state``."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments import state_store
from deployments.aliases import AliasTarget
from deployments.backend import SetAlias
from deployments.cli import app
from deployments.config import ClusterSettings
from deployments.state_store import SqliteStateStore
from deployments.state_transfer import JournalNotEmptyError, export_state, import_state
from tests.deployments.cluster import Cluster, running_cluster
from tests.resolvers.s3_server import CREDENTIALS, Bucket, s3_server


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1") as cluster:
        for content in ("a", "b"):
            path = cluster.write_adapter(content, content)
            call = cluster.load("sql", path, op_id=content, load_inplace=True, pin=True)
            await cluster.clock.finish(call)
        await cluster.clock.finish(cluster.load("gone", path, op_id="gone"))
        await cluster.clock.finish(cluster.unload("gone"))
        alias = SetAlias(name="prod", targets=(AliasTarget("sql@1", 3), AliasTarget("sql", 1)))
        await cluster.clock.finish(cluster.controller.set_alias(alias, "alias"))
        yield cluster


async def test_everything_that_names_mean_goes_along(cluster: Cluster, tmp_path: Path) -> None:
    text = json.dumps(export_state(cluster.store.journal))
    other = SqliteStateStore(tmp_path / "other.sqlite3").journal
    assert import_state(other, text) == 1
    here, there = cluster.store.load(), other.load()
    for part in ("adapters", "kept", "aliases", "unloaded"):
        assert getattr(there, part) == getattr(here, part)
    assert there.journal_id != here.journal_id
    assert there.table_version > here.table_version
    assert there.members == ()
    assert other.last_generation() == cluster.store.journal.last_generation()
    other.close()


async def test_an_import_does_not_take_generations_back(cluster: Cluster, tmp_path: Path) -> None:
    text = json.dumps({**export_state(cluster.store.journal), "generation": 1, "table_version": 1})
    before = cluster.store.load()
    generation = cluster.store.journal.last_generation()
    with pytest.raises(JournalNotEmptyError, match="1 adapters and 1 aliases"):
        import_state(cluster.store.journal, text)
    import_state(cluster.store.journal, text, replace=True)
    assert cluster.store.journal.last_generation() == generation
    assert cluster.store.load().table_version > before.table_version


async def test_replicas_adopt_an_imported_state(cluster: Cluster) -> None:
    document = export_state(cluster.store.journal)
    expected = (await cluster.controller.get_adapter("sql")).version
    cluster.kill_controller()
    for path in cluster.root.glob("journal.sqlite3*"):
        path.unlink()
    store = SqliteStateStore(cluster.root / "journal.sqlite3").journal
    import_state(store, json.dumps(document))
    store.close()
    cluster.start_controller()
    await cluster.clock.advance(3)
    replica = cluster.replicas["r1"]
    assert replica.link.table.find("sql") == expected
    assert replica.link.table.find_alias("prod") is not None
    assert (await cluster.controller.get_adapter("sql")).kept[0].generation == 1


async def test_the_command_moves_a_journal_to_s3_and_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(export_state(cluster.store.journal)))
    with s3_server() as port:
        Bucket(port, "journals").create()
        place = ["--state-dir", "s3://journals/here", "--endpoint-url", f"http://127.0.0.1:{port}"]

        async def invoke(command: str, *arguments: str) -> Result:
            options = ["state", command, "--model", "team/model", *place, *arguments]
            return await asyncio.to_thread(CliRunner().invoke, app, options)

        missing = await invoke("export")
        assert (missing.exit_code, "there is no journal" in missing.output) == (1, True)
        assert "imported 1 adapters" in (await invoke("import", str(file))).output
        exported = json.loads((await invoke("export")).output)
        refused = await invoke("import", str(file))
        assert (refused.exit_code, "already" in refused.output) == (1, True)
    wanted = json.loads(file.read_text())
    for part in ("adapters", "kept", "aliases", "unloaded", "generation"):
        assert exported[part] == wanted[part]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}'])
def test_other_documents_are_refused(tmp_path: Path, text: str) -> None:
    store = SqliteStateStore(tmp_path / "journal.sqlite3").journal
    with pytest.raises(ValueError, match="StateDocument"):
        import_state(store, text)
    assert store.load().adapters == {}
    store.close()


async def test_the_command_moves_a_journal(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "_LOCK_TIMEOUT_S", 0.05)
    source, target = tmp_path / "source", tmp_path / "target"
    place = ClusterSettings(state_dir=str(source)).journal_path("team/model")
    store = SqliteStateStore(place).journal
    import_state(store, json.dumps(export_state(cluster.store.journal)))
    runner, file = CliRunner(), tmp_path / "state.json"

    async def invoke(*arguments: str) -> Result:
        return await asyncio.to_thread(runner.invoke, app, arguments)

    common = ["--model", "team/model", "--state-dir"]
    export = ["state", "export", *common, str(source), "--output", str(file)]
    running = await invoke(*export)
    assert running.exit_code == 1
    assert "only one controller" in running.output
    store.close()
    assert "exported 1 adapters and 1 aliases" in (await invoke(*export)).output
    load = ["state", "import", *common, str(target), str(file)]
    assert "imported 1 adapters and 1 aliases" in (await invoke(*load)).output
    assert (await invoke(*load)).exit_code == 1
    assert (await invoke(*load, "--replace")).exit_code == 0
    shown = await invoke("state", "export", *common, str(target))
    assert json.loads(shown.output)["adapters"].keys() == {"sql"}
    missing = await invoke("state", "export", *common, str(tmp_path / "nothing"))
    assert (missing.exit_code, "no journal" in missing.output) == (1, True)
    unread = await invoke("state", "import", *common, str(target), str(tmp_path / "nothing.json"))
    assert (unread.exit_code, "nothing.json" in unread.output) == (1, True)
