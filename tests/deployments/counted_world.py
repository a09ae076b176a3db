"""A replica with a real engine behind the HTTP surface, where everything taken is counted.

The model is tiny; controller, journal and store are the real ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from adapters import AdapterVersion
from deployments.backend import BaseModelInfo, LoadAdapter, UnloadAdapter
from deployments.clock import SystemClock
from deployments.cluster_protocol import MemberId, Register
from deployments.controller import Controller
from deployments.controller_settings import ControllerSettings
from deployments.generation import GenerateRequest, GenerationItem
from deployments.http_app import create_http_app
from deployments.llm_server import LLMServer
from deployments.model_profile import ModelProfile
from deployments.push_store import PushStore
from deployments.replica_link import ReplicaLink
from deployments.sources import AdapterSources
from deployments.state_store import SqliteStateStore
from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig, LoRAConfig, SchedulerConfig
from resolvers.file_lock import lock_existing
from resolvers.store import AdapterStore
from tests.consistency.adapter_makers import ForcingAdapters, save_forced_model
from tests.deployments.cluster import FakeLiveness
from tests.deployments.http_client import Client, Json
from tests.deployments.local_backend import LocalBackend
from tests.deployments.test_http_disconnect import Connection

COMPLETIONS = "/v1/completions"
BASE = "tiny"
NAME = "policy"
PROMPT = "t5 t6 t7"
# More than fits beside another one of the same length, so that one of two is preempted.
LONG, NUM_BLOCKS, BLOCK_SIZE = 100, 40, 4
UNLOAD_TIMEOUT_S = 5.0


@contextmanager
def counted_engine(path: Path) -> Iterator[AsyncEngine]:
    """An engine with a tiny model, kept in ``path``, that answers what its adapters force."""
    save_forced_model(path)
    engine = AsyncEngine(
        EngineConfig(
            model=path,
            device="cpu",
            max_model_len=128,
            num_threads=1,
            cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=4),
            lora=LoRAConfig(max_loras=2, max_cpu_loras=4),
        )
    )
    asyncio.run(engine.start())
    try:
        yield engine
    finally:
        asyncio.run(engine.stop())


class Served(LocalBackend):
    """One replica with adapters, as the ingress sees it."""

    allow_runtime_updating = True

    def __init__(self, server: LLMServer, controller: Controller) -> None:
        super().__init__(server)
        self.controller = controller

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem]:
        return self._server.generate(request)

    async def load_adapter(self, load: LoadAdapter) -> AdapterVersion:
        return await self.controller.load(load, load.op_id)

    async def unload_adapter(self, unload: UnloadAdapter) -> AdapterVersion:
        return await self.controller.unload(unload, unload.op_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    engine: AsyncEngine
    server: LLMServer
    link: ReplicaLink
    store_dir: Path
    app: FastAPI
    client: Client
    controller: Controller
    version: AdapterVersion

    async def complete(self, model: str = NAME, **body: object) -> Json:
        asked: Json = {"model": model, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        response = await self.client.post(COMPLETIONS, json={**asked, **body})
        document: Json = response.json()
        return document

    def connect(self, *, broken: bool = False, pause_s: float = 0.0, **body: object) -> Connection:
        asked: Json = {"model": NAME, "prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True}
        return Connection(self.app, {**asked, **body}, broken=broken, pause_s=pause_s)

    async def unload(self, *, force: bool = False) -> None:
        path = f"/v1/adapters/{NAME}?timeout_s={UNLOAD_TIMEOUT_S}&force={str(force).lower()}"
        response = await self.client.delete(path)
        assert response.status_code == 200, response.text

    def num_running(self) -> int:
        return sum(held.num_running for held in self.engine.loras())

    async def until_running(self) -> None:
        await until(lambda: self.num_running() > 0)

    async def until_nothing_is_left(self) -> None:
        digest = self.version.digest
        await until(lambda: not self.link.adapters.is_loaded(digest))
        await until(lambda: self.engine.loras() == [])
        await until(lambda: not self.link._tasks)
        stats = self.engine.stats()
        assert stats.num_running + stats.num_waiting + stats.num_slots_in_use == 0
        assert stats.num_free_blocks == stats.num_blocks
        assert not self.link.table.is_used(digest)
        assert not self.link.table._uses
        assert not self.server._running
        assert not self.engine._delivery._streams
        # Nobody holds the files: the store could remove them.
        fd = lock_existing(self.store_dir / "adapters" / digest, shared=False, wait=False)
        assert fd is not None


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 -- plain facts of another thread
            await asyncio.sleep(0.002)


@asynccontextmanager
async def open_world(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[World]:
    """Serve one adapter from this engine."""
    adapters = ForcingAdapters(tmp_path / "adapters")
    path = await asyncio.to_thread(adapters.write, 0)
    sources = AdapterSources(
        BASE, AdapterStore(tmp_path / "store"), allowed_roots=[str(tmp_path / "adapters")]
    )
    store = SqliteStateStore(tmp_path / "journal.sqlite3")
    controller = Controller(
        ControllerSettings(base_model=BASE, allow_runtime_updating=True, lease_s=5.0, poll_s=0.5),
        store,
        sources,
        pushes=PushStore(tmp_path / "pushed"),
        liveness=FakeLiveness(),
        clock=SystemClock(),
    )
    info = BaseModelInfo(
        id=BASE,
        root=BASE,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        created=0,
    )
    profile = ModelProfile(chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    server = LLMServer("r1", engine, info, profile=profile)
    link = ReplicaLink(
        Register(member=MemberId("r1", "1")),
        controller,
        engine,
        sources,
        clock=SystemClock(),
        abort_running=server.abort_running,
    )
    server.attach(link)
    await link.join()
    backend = Served(server, controller)
    app = create_http_app(backend)
    async with Client(backend) as client:
        version = await controller.load(LoadAdapter(name=NAME, source=str(path)), "load")
        yield World(
            engine=engine,
            server=server,
            link=link,
            store_dir=tmp_path / "store",
            app=app,
            client=client,
            controller=controller,
            version=version,
        )
    await link.leave()
    await store.close()
