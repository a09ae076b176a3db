"""The journal keeps what it said, across crashes and for one controller only."""

import subprocess
import sys
from pathlib import Path

import pytest

from adapters import AdapterVersion
from deployments import state_store
from deployments.cluster_protocol import MemberId, Register
from deployments.errors import JournalUnavailableError
from deployments.operations import Operation, OperationKind, OperationPhase
from deployments.state_store import SqliteStateStore

ROOT = Path(__file__).resolve().parents[2]


def operation(op_id: str, name: str = "sql") -> Operation:
    return Operation(op_id=op_id, kind=OperationKind.LOAD, name=name, requested_by="ann")


def version(name: str, generation: int) -> AdapterVersion:
    return AdapterVersion(
        name=name,
        generation=generation,
        digest="d" * 64,
        source_uri="file:///a",
        base_model="base",
        rank=8,
        size_bytes=1,
        pinned=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite3"


def test_state_survives_reopening(path: Path) -> None:
    store = SqliteStateStore(path)
    member = Register(member=MemberId("r1", "a"), node="n", actor_name="actor")
    store.add_member(member)
    begun = store.begin(operation("one"))
    store.commit("one", version("sql", begun.generation), forget=False, now=1.0)
    store.begin(operation("two", "other"))
    store.write_setting("key", "value")
    before = store.load()
    store.close()
    store = SqliteStateStore(path)
    assert store.load() == before
    assert before.adapters == {"sql": version("sql", 1)}
    assert before.members == (member,)
    assert [(o.op_id, o.phase) for o in before.open_operations] == [
        ("one", OperationPhase.COMMITTING),
        ("two", OperationPhase.PREPARING),
    ]
    assert store.read_setting("key") == "value"
    store.remove_member(member.member)
    assert store.load().members == ()


def test_generations_and_table_versions_are_never_used_twice(path: Path) -> None:
    store = SqliteStateStore(path)
    generations, table_versions = [], []
    for index in range(6):
        begun = store.begin(operation(f"op-{index}"))
        generations.append(begun.generation)
        if index % 2:
            store.abort(begun.op_id, "refused", now=1.0)
        else:
            made = store.commit(
                begun.op_id, version("sql", begun.generation), forget=index == 4, now=1.0
            )
            table_versions.append(made.table_version)
            store.finish(begun.op_id, now=2.0)
        store.close()
        store = SqliteStateStore(path)
    assert generations == [1, 2, 3, 4, 5, 6]
    assert table_versions == [1, 2, 3]
    assert store.load().adapters == {}
    assert store.load().unloaded == {"sql"}


def test_phases_cannot_be_skipped_or_repeated(path: Path) -> None:
    store = SqliteStateStore(path)
    store.begin(operation("one"))
    with pytest.raises(ValueError, match="not in phase"):
        store.finish("one", now=1.0)
    store.commit("one", version("sql", 1), forget=False, now=1.0)
    for step in (
        lambda: store.commit("one", version("sql", 1), forget=False, now=1.0),
        lambda: store.abort("one", "", now=1.0),
        lambda: store.finish("unknown", now=1.0),
    ):
        with pytest.raises(ValueError, match="not in phase"):
            step()
    assert store.load().table_version == 1


def test_only_one_controller_holds_the_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStateStore(path)
    monkeypatch.setattr(state_store, "_LOCK_TIMEOUT_S", 0.05)
    with pytest.raises(JournalUnavailableError, match="only one controller"):
        SqliteStateStore(path)
    store.close()
    SqliteStateStore(path).close()


def test_killed_process_leaves_whole_steps_and_no_lock(path: Path) -> None:
    code = f"""
import os, sqlite3
from pathlib import Path
from tests.deployments.test_state_store import operation, version
from deployments.state_store import SqliteStateStore
store = SqliteStateStore(Path({str(path)!r}))
store.begin(operation("one"))
store.commit("one", version("sql", 1), forget=False, now=1.0)
store.begin(operation("two"))
store._db.execute("BEGIN IMMEDIATE")
store._db.execute("DELETE FROM adapters")
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -9
    state = SqliteStateStore(path).load()
    assert state.adapters == {"sql": version("sql", 1)}
    assert [o.phase for o in state.open_operations] == [
        OperationPhase.COMMITTING,
        OperationPhase.PREPARING,
    ]


def test_ended_operations_are_forgotten_after_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "MAX_ENDED_OPERATIONS", 3)
    monkeypatch.setattr(state_store, "_PRUNE_EVERY", 1)
    store = SqliteStateStore(path)
    store.begin(operation("open"))
    for index in range(8):
        store.begin(operation(f"op-{index}"))
        store.abort(f"op-{index}", "refused", now=float(index))
    store.begin(operation("last"))
    kept = [f"op-{index}" for index in range(8) if store.find_operation(f"op-{index}")]
    assert kept == ["op-5", "op-6", "op-7"]
    assert store.find_operation("open") is not None
