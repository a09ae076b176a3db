"""A cluster in one process: a controller with a real journal, replicas with small engines.

The network between them can be cut and the controller killed at any point.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from adapters import adapter_digest, find_adapter_files
from deployments.backend import LoadAdapter, UnloadAdapter
from deployments.cluster_protocol import (
    ForcedEnd,
    MemberId,
    PrepareReport,
    Register,
    RegisterAnswer,
    Resolved,
    Watch,
    WatchAnswer,
)
from deployments.controller import Controller
from deployments.controller_settings import ControllerSettings
from deployments.push_fetcher import PushedFile, PushFetcher
from deployments.push_store import PUSH_SCHEME, PushStore
from deployments.replica_link import ReplicaLink
from deployments.sources import AdapterSources
from deployments.state_store import SqliteStateStore
from resolvers.base import Resolver
from resolvers.chain import Link, ResolverChain
from resolvers.store import AdapterStore
from tests.deployments.fake_clock import FakeClock
from tests.deployments.fake_engine import FakeEngine

BASE = "base"


class Killed(BaseException):
    """The controller's process ended here."""


class FragileStore(SqliteStateStore):
    """Dies before or after a step of the journal, as a killed process would."""

    die_before: str | None = None
    die_after: str | None = None
    is_dead = False
    on_death: Callable[[], None]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("begin", "commit", "commit_alias"):

            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self._step(name):
                    return await value(*args, **kwargs)

            return awaited
        if name in ("finish", "abort"):

            def step(*args: Any, **kwargs: Any) -> Any:
                with self._step(name):
                    return value(*args, **kwargs)

            return step
        return value

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        if self.is_dead:
            raise Killed
        if self.die_before == name:
            self._die()
        yield
        if self.die_after == name:
            self._die()

    def _die(self) -> None:
        self.on_death()
        raise Killed


class FakeLiveness:
    def __init__(self) -> None:
        self.dead: set[str] = set()

    async def find_dead(self, actors: Mapping[str, str]) -> set[str]:
        return self.dead & actors.keys()


class Network:
    """One replica's connection. Calls to a dead controller wait for the next, as Ray's do."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.is_up = asyncio.Event()
        self.is_up.set()

    async def _call(self, method: str, *args: Any) -> Any:
        while True:
            await self.is_up.wait()
            controller = await self._cluster.controller_when_up()
            call = asyncio.ensure_future(getattr(controller, method)(*args))
            death = asyncio.ensure_future(self._cluster.death.wait())
            await asyncio.wait((call, death), return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            if call.done() and not self._cluster.death.is_set():
                await self.is_up.wait()
                return call.result()
            call.cancel()
            await asyncio.wait((call,))
            if not call.cancelled():
                call.exception()

    async def register(self, request: Register) -> RegisterAnswer:
        return await self._call("register", request)

    async def watch(self, request: Watch) -> WatchAnswer:
        return await self._call("watch", request)

    async def report(self, member: MemberId, op_id: str, report: PrepareReport) -> None:
        await self._call("report", member, op_id, report)

    async def resolve(self, name: str, member: MemberId) -> Resolved:
        return await self._call("resolve", name, member)

    async def leave(self, member: MemberId) -> None:
        await self._call("leave", member)


class Replica:
    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.name = name
        self.engine = FakeEngine()
        self.network = Network(cluster)
        self.aborted: list[ForcedEnd] = []
        self.link = ReplicaLink(
            Register(member=MemberId(name, "1"), node="node", actor_name=name),
            self.network,
            self.engine,
            cluster.sources(name),
            clock=cluster.clock,
            abort_running=self._abort,
        )

    async def _abort(self, end: ForcedEnd) -> None:
        self.aborted.append(end)

    async def digest_for(self, adapter: str, split_key: str = "") -> str:
        """Start a request and say which bytes it runs on."""
        async with self.link.admit(adapter, split_key) as admitted:
            assert admitted.lora.digest in self.engine.loaded
            return admitted.version.digest

    def kill(self) -> None:
        self.network.is_up.clear()
        for task in self.link._tasks:
            task.cancel()
        if self.link._watching is not None:
            self.link._watching.cancel()


class Cluster:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.liveness = FakeLiveness()
        self.resolvers: list[Resolver] = []
        self.replicas: dict[str, Replica] = {}
        self.death = asyncio.Event()
        self.pushes = PushStore(root / "pushed")
        self.settings = ControllerSettings(base_model=BASE, allow_runtime_updating=True)
        self._up = asyncio.Event()
        self.start_controller()

    def sources(self, node: str = "head") -> AdapterSources:
        links = [Link(type(resolver).__name__, resolver) for resolver in self.resolvers]
        store = AdapterStore(self.store_dir(node))
        pushed = PushFetcher(store, PushStore(self.store_dir(node) / "pushed"), self.read_pushed)
        return AdapterSources(
            BASE,
            store,
            fetchers={PUSH_SCHEME: pushed},
            resolver=ResolverChain(links),
            allowed_roots=[str(self.root / "adapters")],
        )

    async def read_pushed(self, digest: str) -> list[PushedFile]:
        """Read files where the controller keeps them, in small parts."""
        await self.controller_when_up()
        files = []
        for path in (await self.pushes.bring(digest)).iterdir():
            data = path.read_bytes()
            parts = [self._part(data[at : at + 3]) for at in range(0, len(data), 3)]
            files.append(PushedFile(name=path.name, size_bytes=len(data), parts=parts))
        return files

    async def _part(self, data: bytes) -> bytes:
        await asyncio.sleep(0)
        return data

    def store_dir(self, node: str) -> Path:
        return self.root / "stores" / node

    def lose_store(self, node: str) -> None:
        """Empty a node's store, as if others had needed the room."""
        for path in (self.store_dir(node) / "adapters").iterdir():
            shutil.rmtree(path)

    # -- the controller's process

    def start_controller(self) -> None:
        self.death = asyncio.Event()
        self.store = FragileStore(self.root / "journal.sqlite3")
        self.store.on_death = self.kill_controller
        self.controller = Controller(
            self.settings,
            self.store,
            self.sources(),
            pushes=self.pushes,
            liveness=self.liveness,
            clock=self.clock,
        )
        self._up.set()

    def kill_controller(self) -> None:
        """End the controller as kill -9 would: nothing more reaches the journal."""
        self.store.is_dead = True
        self.store.journal.close()
        self._up.clear()
        self.death.set()
        for task in tuple(self.controller._operations.runner.tasks.values()):
            task.cancel()

    async def controller_when_up(self) -> Controller:
        await self._up.wait()
        return self.controller

    # -- actions

    async def add_replica(self, name: str) -> Replica:
        replica = self.replicas[name] = Replica(self, name)
        await self.clock.finish(replica.link.join())
        return replica

    def write_adapter(self, name: str, content: str = "weights") -> Path:
        path = self.root / "adapters" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(content)
        return path

    def digest(self, path: Path) -> str:
        return adapter_digest(find_adapter_files(path))

    async def load(self, name: str, path: Path | None, *, op_id: str = "", **options: Any) -> Any:
        load = LoadAdapter(name=name, source=None if path is None else str(path), **options)
        return await self.controller.load(load, op_id or f"load-{name}-{self.clock.now()}")

    async def unload(self, name: str, *, op_id: str = "", **options: Any) -> Any:
        unload = UnloadAdapter(name=name, **options)
        return await self.controller.unload(unload, op_id or f"unload-{name}-{self.clock.now()}")

    def phases(self) -> dict[str, str]:
        rows = self.store.journal._db.execute("SELECT op_id, phase FROM operations").fetchall()
        return {row["op_id"]: row["phase"] for row in rows}

    async def close(self) -> None:
        for replica in self.replicas.values():
            replica.kill()
        self.kill_controller()
        await self.clock.advance(0.1)


ClusterT = TypeVar("ClusterT", bound=Cluster)


@asynccontextmanager
async def running_cluster(
    root: Path, *replicas: str, cluster_type: type[ClusterT] = Cluster
) -> AsyncIterator[ClusterT]:
    cluster = cluster_type(root)
    try:
        for name in replicas:
            await cluster.add_replica(name)
        yield cluster
    finally:
        await cluster.close()
