"""Two controllers that both take the journal in S3 for theirs: one stops, the promise holds."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from deployments.backend import LoadAdapter, UnloadAdapter
from deployments.clock import SystemClock
from deployments.cluster_protocol import MemberId, Register, Watch, WatchAnswer
from deployments.controller import Controller
from deployments.controller_settings import ControllerSettings
from deployments.errors import JournalLostError, ReplicaUnavailableError
from deployments.journal_object import JournalObject
from deployments.push_store import PushStore
from deployments.replica_link import ReplicaLink
from deployments.s3_state_store import S3StateStore
from deployments.sources import AdapterSources
from resolvers.store import AdapterStore
from tests.deployments.cluster import BASE, FakeLiveness
from tests.deployments.fake_engine import FakeEngine
from tests.resolvers.s3_server import CREDENTIALS, Bucket, FaultyProxy, s3_server

LEASE_S = 1.5


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with s3_server() as port, FaultyProxy(port).running() as proxy:
        yield proxy


class Fleet:
    """Controllers that all mean the same journal, and replicas that each follow one of them."""

    def __init__(self, root: Path, place: JournalObject, stack: AsyncExitStack) -> None:
        self.root = root
        self.place = place
        self.stack = stack

    def sources(self) -> AdapterSources:
        roots = [str(self.root / "adapters")]
        return AdapterSources(BASE, AdapterStore(self.root / "store"), allowed_roots=roots)

    async def start_controller(self) -> Controller:
        store = await S3StateStore.open(self.place)
        self.stack.push_async_callback(store.close)
        settings = ControllerSettings(
            base_model=BASE, allow_runtime_updating=True, lease_s=LEASE_S, poll_s=0.1
        )
        return Controller(
            settings,
            store,
            self.sources(),
            pushes=PushStore(self.root / "pushed"),
            liveness=FakeLiveness(),
            clock=SystemClock(),
        )

    async def join(self, name: str, controller: Any) -> ReplicaLink:
        link = ReplicaLink(
            Register(member=MemberId(name, "1")),
            controller,
            FakeEngine(),
            self.sources(),
            clock=SystemClock(),
            abort_running=_abort,
        )
        await link.join()
        self.stack.callback(link._watching.cancel)  # type: ignore[union-attr]
        return link

    def load(self) -> LoadAdapter:
        path = self.root / "adapters" / "sql"
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text("weights")
        return LoadAdapter(name="sql", source=str(path))


async def _abort(version: object) -> None: ...


@pytest.fixture
async def fleet(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(proxy.upstream, tmp_path.name.replace("_", "-").lower()[-60:].strip("-"))
    bucket.create()
    place = JournalObject(f"s3://{bucket.name}/model.journal", endpoint_url=proxy.url)
    async with AsyncExitStack() as stack:
        yield Fleet(tmp_path, place, stack)


async def test_no_replica_admits_what_another_controller_unloaded(fleet: Fleet) -> None:
    first = await fleet.start_controller()
    replica = await fleet.join("r1", first)
    await first.load(fleet.load(), "load")
    second = await fleet.start_controller()
    other = await fleet.join("r2", second)
    assert other.table.find("sql") is not None

    unload = asyncio.create_task(second.unload(UnloadAdapter(name="sql"), "unload"))
    while not unload.done():
        if replica.holds_lease:
            async with replica.admit("sql"):
                pass
        await asyncio.sleep(0.01)
    await unload
    assert not replica.holds_lease
    with pytest.raises(ReplicaUnavailableError):
        async with replica.admit("sql"):
            pass
    assert other.table.find("sql") is None
    for call in (
        first.watch(Watch(member=MemberId("r2", "1"), journal_id="", table_version=0)),
        first.load(LoadAdapter(name="x", source=str(fleet.root / "adapters" / "sql")), "x"),
    ):
        with pytest.raises(Exception, match=r"another controller|holds no lease"):
            await call


async def test_a_replica_of_the_controller_that_stopped_may_join_the_other(fleet: Fleet) -> None:
    first = await fleet.start_controller()
    current: dict[str, Controller] = {"controller": first}

    class Port:
        """Calls whatever controller Ray would find now."""

        def __getattr__(self, method: str) -> Any:
            return getattr(current["controller"], method)

    replica = await fleet.join("r1", Port())
    version = await first.load(fleet.load(), "load")
    current["controller"] = second = await fleet.start_controller()
    async with asyncio.timeout(10):
        while not (await second.list_replicas())[0].table_version >= 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert replica.holds_lease
    async with replica.admit("sql") as admitted:
        assert admitted.version == version
    with pytest.raises(JournalLostError):
        await first.unload(UnloadAdapter(name="sql"), "unload")


async def test_no_lease_is_granted_while_the_journal_cannot_be_seen(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.s3_state_store._PATIENCE_S", 0.1)
    controller = await fleet.start_controller()
    answers: list[WatchAnswer] = []

    class Port:
        def __getattr__(self, method: str) -> Any:
            return getattr(controller, method)

        async def watch(self, request: Watch) -> WatchAnswer:
            answers.append(await controller.watch(request))
            return answers[-1]

    replica = await fleet.join("r1", Port())
    await controller.load(fleet.load(), "load")
    away = JournalObject(fleet.place.uri, endpoint_url="http://127.0.0.1:9")
    store = controller._store
    assert isinstance(store, S3StateStore)
    monkeypatch.setattr(store, "_place", away)
    num_answers = len(answers)
    await asyncio.sleep(LEASE_S * 1.2)
    assert len(answers) <= num_answers + 1
    assert not replica.holds_lease
    monkeypatch.setattr(store, "_place", fleet.place)
    async with asyncio.timeout(10):
        while not replica.holds_lease:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
