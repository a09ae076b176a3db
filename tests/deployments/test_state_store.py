"""The journal keeps what it said, across crashes and for one controller only."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from adapters import AdapterVersion
from deployments import journal, s3_state_store, state_store
from deployments.cluster_protocol import MemberId, Register
from deployments.errors import JournalLostError, JournalUnavailableError
from deployments.journal_object import JournalObject
from deployments.operations import Operation, OperationKind, OperationPhase, OperationQuery
from deployments.s3_state_store import S3StateStore, read_object
from deployments.state_store import SqliteStateStore, StateStore
from tests.resolvers.s3_server import (
    CREDENTIALS,
    Answer,
    Bucket,
    Fault,
    FaultyProxy,
    refuse,
    reset,
    s3_server,
)

ROOT = Path(__file__).resolve().parents[2]
KEY = "state/model.journal"

Open = Callable[[], Awaitable[StateStore]]


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


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


_numbers = itertools.count()


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(s3_port, f"journals-{next(_numbers)}")
    bucket.create()
    return bucket


@pytest.fixture
def proxy(s3_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_port).running() as proxy:
        yield proxy


@pytest.fixture
def place(bucket: Bucket, proxy: FaultyProxy) -> JournalObject:
    return JournalObject(f"s3://{bucket.name}/{KEY}", endpoint_url=proxy.url)


@pytest.fixture(params=["file", "object"])
def open_store(request: pytest.FixtureRequest, path: Path) -> Open:
    """Opens the same journal again and again, in either of its places."""
    if request.param == "file":

        async def open_file() -> StateStore:
            return SqliteStateStore(path)

        return open_file
    place = request.getfixturevalue("place")
    return lambda: S3StateStore.open(place)


# -- what every store promises


async def test_state_survives_reopening(open_store: Open) -> None:
    store = await open_store()
    member = Register(member=MemberId("r1", "a"), node="n", actor_name="actor")
    await store.add_member(member)
    begun = await store.begin(operation("one"))
    await store.commit("one", version("sql", begun.generation), forget=False, now=1.0)
    await store.begin(operation("two", "other"))
    await store.write_setting("key", "value")
    before = store.load()
    await store.close()
    store = await open_store()
    assert store.load() == before
    assert before.adapters == {"sql": version("sql", 1)}
    assert before.members == (member,)
    assert [(o.op_id, o.phase) for o in before.open_operations] == [
        ("one", OperationPhase.COMMITTING),
        ("two", OperationPhase.PREPARING),
    ]
    assert store.journal.read_setting("key") == "value"
    store.remove_member(member.member)
    assert store.load().members == ()
    await store.close()


async def test_generations_and_table_versions_are_never_used_twice(open_store: Open) -> None:
    store = await open_store()
    generations, table_versions = [], []
    for index in range(6):
        begun = await store.begin(operation(f"op-{index}"))
        generations.append(begun.generation)
        if index % 2:
            store.abort(begun.op_id, "refused", now=1.0)
        else:
            made = await store.commit(
                begun.op_id, version("sql", begun.generation), forget=index == 4, now=1.0
            )
            table_versions.append(made.table_version)
            store.finish(begun.op_id, now=2.0)
        await store.close()
        store = await open_store()
    assert generations == [1, 2, 3, 4, 5, 6]
    assert table_versions == [1, 2, 3]
    assert store.load().adapters == {}
    assert store.load().unloaded == {"sql"}
    await store.close()


async def test_phases_cannot_be_skipped_or_repeated(open_store: Open) -> None:
    store = await open_store()
    await store.begin(operation("one"))
    with pytest.raises(ValueError, match="not in phase"):
        store.finish("one", now=1.0)
    await store.commit("one", version("sql", 1), forget=False, now=1.0)
    with pytest.raises(ValueError, match="not in phase"):
        await store.commit("one", version("sql", 1), forget=False, now=1.0)
    with pytest.raises(ValueError, match="not in phase"):
        store.abort("one", "", now=1.0)
    with pytest.raises(ValueError, match="not in phase"):
        store.finish("unknown", now=1.0)
    assert store.load().table_version == 1
    await store.close()


async def test_commits_return_in_the_order_of_their_table_versions(open_store: Open) -> None:
    store = await open_store()
    returned: list[int | None] = []

    async def load(index: int) -> None:
        await store.begin(operation(f"op-{index}", f"a{index}"))
        made = await store.commit(f"op-{index}", version(f"a{index}", index), forget=False, now=1.0)
        returned.append(made.table_version)

    await asyncio.gather(*map(load, range(20)))
    assert returned == list(range(1, 21))
    await store.close()


async def test_ended_operations_are_forgotten_after_many(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "PRUNE_EVERY", 1)
    store = await open_store()
    monkeypatch.setattr(store.journal, "_max_ended_operations", 3)
    await store.begin(operation("open"))
    for index in range(8):
        await store.begin(operation(f"op-{index}"))
        store.abort(f"op-{index}", "refused", now=float(index))
    await store.begin(operation("last"))
    kept = [f"op-{index}" for index in range(8) if store.find_operation(f"op-{index}")]
    assert kept == ["op-5", "op-6", "op-7"]
    assert store.find_operation("open") is not None
    await store.close()


# -- in a file


async def test_only_one_controller_opens_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStateStore(path)
    monkeypatch.setattr(state_store, "_LOCK_TIMEOUT_S", 0.05)
    with pytest.raises(JournalUnavailableError, match="only one controller"):
        SqliteStateStore(path)
    await store.close()
    await SqliteStateStore(path).close()


def test_killed_process_leaves_whole_steps_and_no_lock(path: Path) -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from tests.deployments.test_state_store import operation, version
from deployments.state_store import SqliteStateStore

async def main():
    store = SqliteStateStore(Path({str(path)!r}))
    await store.begin(operation("one"))
    await store.commit("one", version("sql", 1), forget=False, now=1.0)
    await store.begin(operation("two"))
    store.journal._db.execute("BEGIN IMMEDIATE")
    store.journal._db.execute("DELETE FROM adapters")
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -9
    state = SqliteStateStore(path).load()
    assert state.adapters == {"sql": version("sql", 1)}
    assert [o.phase for o in state.open_operations] == [
        OperationPhase.COMMITTING,
        OperationPhase.PREPARING,
    ]


# -- in an object


async def test_the_controller_that_started_first_stops_for_good(place: JournalObject) -> None:
    first = await S3StateStore.open(place)
    await first.begin(operation("one"))
    second = await S3StateStore.open(place)
    with pytest.raises(JournalLostError, match="another controller"):
        await first.commit("one", version("sql", 1), forget=False, now=1.0)
    assert first.load().adapters == {}
    for change in (first.begin(operation("two")), first.confirm(first.mark())):
        with pytest.raises(JournalLostError):
            await change
    with pytest.raises(JournalLostError):
        first.check_held()
    assert (await second.begin(operation("two"))).generation == 2
    await second.close()


async def test_no_lease_is_confirmed_after_another_controller_took_over(
    place: JournalObject, proxy: FaultyProxy
) -> None:
    first = await S3StateStore.open(place)
    before = first.mark()
    await first.begin(operation("one"))
    second = await S3StateStore.open(place)
    num_requests = len(proxy.seen)
    # A write since then is as good as a look. What began before the take-over is waited for.
    await first.confirm(before)
    assert len(proxy.seen) == num_requests
    with pytest.raises(JournalLostError):
        await first.confirm(first.mark())
    await second.close()


async def test_one_look_is_enough_for_all_who_asked_before_it(
    place: JournalObject, proxy: FaultyProxy
) -> None:
    store = await S3StateStore.open(place)
    num_looks = proxy.count("HEAD")
    await asyncio.gather(*(store.confirm(store.mark()) for _ in range(50)))
    assert proxy.count("HEAD") == num_looks + 1
    await store.close()


async def test_of_many_controllers_that_start_together_one_is_left(place: JournalObject) -> None:
    opened = await asyncio.gather(*(S3StateStore.open(place) for _ in range(4)))
    outcomes = await asyncio.gather(
        *(store.begin(operation("x")) for store in opened), return_exceptions=True
    )
    assert sum(isinstance(outcome, Operation) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, JournalLostError) for outcome in outcomes) == 3


async def test_changes_at_the_same_time_share_a_write(
    place: JournalObject, proxy: FaultyProxy
) -> None:
    store = await S3StateStore.open(place)
    num_writes = proxy.count("PUT")
    begun = await asyncio.gather(*(store.begin(operation(f"op-{i}")) for i in range(100)))
    assert [each.generation for each in begun] == list(range(1, 101))
    assert proxy.count("PUT") <= num_writes + 2
    await store.close()


def lose_answer(answer: Answer) -> Answer:
    reset()
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(before=reset, match="PUT", times=3),
        Fault(change=lose_answer, match="PUT"),
        Fault(change=refuse(503, "SlowDown"), match="PUT", times=2),
        Fault(change=refuse(409, "ConditionalRequestConflict"), match="PUT"),
        Fault(change=lose_answer, match="PUT", times=2),
    ],
    ids=["not sent", "answer lost", "busy", "conflict", "answers lost"],
)
async def test_a_write_whose_answer_is_lost_happens_once(
    place: JournalObject, proxy: FaultyProxy, fault: Fault
) -> None:
    store = await S3StateStore.open(place)
    proxy.faults.append(fault)
    begun = await store.begin(operation("one"))
    assert begun.generation == 1
    assert (await store.begin(operation("two"))).generation == 2
    await store.close()
    stored = await read_object(place)
    assert [each.op_id for each in stored.list_operations(OperationQuery())] == ["two", "one"]


async def test_a_write_that_is_refused_has_not_happened(
    place: JournalObject, proxy: FaultyProxy
) -> None:
    store = await S3StateStore.open(place)
    await store.begin(operation("one"))
    proxy.faults.append(Fault(instead=refuse(403, "AccessDenied"), match="PUT"))
    with pytest.raises(JournalUnavailableError, match="AccessDenied"):
        await store.commit("one", version("sql", 1), forget=False, now=1.0)
    assert store.load().adapters == {}
    # The next one finds everything as it was.
    made = await store.commit("one", version("sql", 1), forget=False, now=1.0)
    assert made.table_version == 1
    await store.close()


async def test_a_store_that_cannot_be_reached_is_said_in_time(
    place: JournalObject, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_state_store, "_PATIENCE_S", 0.2)
    store = await S3StateStore.open(place)
    monkeypatch.setattr(
        store, "_place", JournalObject(place.uri, endpoint_url="http://127.0.0.1:9")
    )
    with pytest.raises(JournalUnavailableError, match="EndpointConnectionError"):
        await store.begin(operation("one"))
    with pytest.raises(JournalUnavailableError, match="cannot be read"):
        await store.confirm(store.mark())
    with pytest.raises(JournalUnavailableError, match="cannot open"):
        await S3StateStore.open(store._place)


async def test_a_store_without_conditional_writes_is_refused(
    place: JournalObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = place._client.put_object

    def put_always(*, IfMatch: str = "", IfNoneMatch: str = "", **options: object) -> object:
        return put(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(place._client, "put_object", put_always)
    with pytest.raises(JournalUnavailableError, match="ignores If-Match"):
        await S3StateStore.open(place)


async def test_a_damaged_object_is_not_taken_for_an_empty_journal(
    place: JournalObject, bucket: Bucket
) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key=KEY, Body=b"damaged", ACL="public-read-write")
    with pytest.raises(JournalUnavailableError, match="damaged"):
        await S3StateStore.open(place)


async def test_reading_does_not_take_the_journal_over(place: JournalObject) -> None:
    store = await S3StateStore.open(place)
    await store.begin(operation("one"))
    assert (await read_object(place)).find_operation("one") is not None
    assert (await store.begin(operation("two"))).generation == 2
    await store.close()
