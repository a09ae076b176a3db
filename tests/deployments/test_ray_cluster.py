"""The same promises on a real Ray cluster: processes that die, calls that cross them."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray import serve
from ray.exceptions import RayError

from deployments import AdapterController
from deployments.app import REPLICAS, bind_replicas
from deployments.backend import LoadAdapter, UnloadAdapter
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig
from deployments.controller_actor import Deployed, RayLiveness, find_or_create_controller
from deployments.errors import (
    AdapterAlreadyLoadedError,
    AdapterInUseError,
    AdapterNotFoundError,
    AdapterRejectedError,
    ClusterError,
    PathNotAllowedError,
    ReplicaUnavailableError,
)
from deployments.generation import GenerateRequest, GenerationStart, PromptInput, TokenizeRequest
from deployments.ray_backend import RayBackend
from engine.sampling_params import SamplingParams
from tests.deployments.fake_engine import make_fake_engine

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
APP = "test"


class Served:
    """A deployed application, as its ingress sees it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = DeploymentConfig(
            model="fake-model",
            num_replicas=2,
            adapters=AdapterSettings(
                directories=(str(root / "adapters"),), allow_runtime_updating=True
            ),
            cluster=ClusterSettings(state_dir=str(root)),
        )
        self.deployed = Deployed(config=self.config, deployed_at=1.0)

    def run(self, num_replicas: int = 2) -> None:
        config = self.config.model_copy(update={"num_replicas": num_replicas})
        serve.run(bind_replicas(config, make_fake_engine), name=APP, route_prefix=None)

    def backend(self) -> RayBackend:
        return RayBackend(serve.get_deployment_handle(REPLICAS, app_name=APP), self.deployed)

    def write_adapter(self, name: str, content: str) -> str:
        path = self.root / "adapters" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(content)
        return str(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}},
    )
    try:
        serve.start(proxy_location="Disabled")
        served = Served(tmp_path_factory.mktemp("cluster"))
        (served.root / "adapters").mkdir()
        served.run()
        yield served
    finally:
        serve.shutdown()
        ray.shutdown()


def request(adapter: str | None, *, max_tokens: int = 3, text: str = "hi") -> GenerateRequest:
    return GenerateRequest(
        request_id=os.urandom(8).hex(),
        prompt=PromptInput(text=text),
        params=SamplingParams(max_tokens=max_tokens),
        adapter=adapter,
    )


async def run(
    backend: RayBackend, adapter: str | None, **options: Any
) -> tuple[GenerationStart, str]:
    start, text = None, ""
    async for item in backend.generate(request(adapter, **options)):
        if isinstance(item, GenerationStart):
            start = item
        else:
            text += "".join(output.text for output in item)
    assert start is not None
    return start, text


async def replicas_seen(
    backend: RayBackend, adapter: str | None, count: int
) -> dict[str, set[int]]:
    """Which generations each replica served in many requests at once."""
    seen: dict[str, set[int]] = {}
    for start, _ in await asyncio.gather(*(run(backend, adapter) for _ in range(count))):
        seen.setdefault(start.replica_id, set()).add(start.generation)
    return seen


async def test_base_model_and_tokenizing(served: Served) -> None:
    backend = served.backend()
    assert await backend.healthy()
    info = await backend.base_model()
    assert (info.id, info.max_model_len) == ("fake-model", 128)
    start, text = await run(backend, None)
    assert (start.generation, start.adapter_name, text) == (0, None, "base base base ")
    tokens = await backend.tokenize(TokenizeRequest(prompt=PromptInput(text="hi")))
    assert tokens.token_ids == start.prompt_token_ids == (104, 105)
    assert await backend.detokenize([104, 105]) == "hi"


async def test_a_client_that_leaves_does_not_end_what_others_wait_for(served: Served) -> None:
    backend = served.backend()
    served.write_adapter("slow", "slow")
    leaving = asyncio.ensure_future(run(backend, "slow"))
    await asyncio.sleep(0.3)
    waiting = [asyncio.ensure_future(run(backend, "slow")) for _ in range(4)]
    await asyncio.sleep(0.2)
    leaving.cancel()
    async with asyncio.timeout(30):
        for start, _ in await asyncio.gather(*waiting):
            assert start.adapter_name == "slow"


async def test_load_replace_and_unload_reach_every_replica(served: Served) -> None:
    backend = served.backend()
    loads = [LoadAdapter(name="sql", source=served.write_adapter(v, v)) for v in ("v1", "v2")]
    first = await backend.load_adapter(loads[0])
    assert await replicas_seen(backend, "sql", 24) == {
        replica.replica_id: {first.generation} for replica in await backend.list_replicas()
    }
    with pytest.raises(AdapterAlreadyLoadedError):
        await backend.load_adapter(loads[1])
    replace = LoadAdapter(name="sql", source=loads[1].source, load_inplace=True, pin=True)
    second = await backend.load_adapter(replace)
    for generations in (await replicas_seen(backend, "sql", 24)).values():
        assert generations == {second.generation}
    status = await backend.get_adapter("sql")
    assert (status.version, [r.host for r in status.replicas]) == (second, [True, True])
    await backend.unload_adapter(UnloadAdapter(name="sql"))
    for _ in range(8):
        with pytest.raises(AdapterNotFoundError):
            await run(backend, "sql")


async def test_a_script_changes_adapters_through_the_handle(served: Served) -> None:
    adapters = AdapterController("fake-model", requested_by="a-script")
    first = await adapters.load("scripted", served.write_adapter("s1", "one"), op_id="scripted-1")
    second = await adapters.load("scripted", served.write_adapter("s2", "two"), replace=True)
    await adapters.set_alias("script-prod", {f"scripted@{first.generation}": 1, "scripted": 3})
    seen = await replicas_seen(served.backend(), f"scripted@{first.generation}", 8)
    assert set().union(*seen.values()) == {first.generation}
    for generations in (await replicas_seen(served.backend(), "script-prod", 8)).values():
        assert generations <= {first.generation, second.generation}
    back = await adapters.roll_back("scripted")
    assert (back.digest, back.created_by) == (first.digest, "a-script")
    assert (await adapters.pin("scripted")).pinned
    assert [status.version.name for status in await adapters.list_adapters("scripted")] == [
        "scripted"
    ]
    operation = (await adapters.get_operation("scripted-1")).operation
    assert (operation.generation, operation.requested_by) == (first.generation, "a-script")
    assert [each.operation.kind for each in await adapters.list_operations("scripted")] == [
        "pin",
        "rollback",
        "load",
        "load",
    ]
    with pytest.raises(AdapterInUseError):
        await adapters.unload("scripted")
    assert (await adapters.delete_alias("script-prod")).name == "script-prod"
    assert (await adapters.unload("scripted")).generation == back.generation
    assert await adapters.list_aliases() == []
    assert len(await adapters.list_replicas()) == 2
    with pytest.raises(ReplicaUnavailableError, match="no deployment of 'other'"):
        await AdapterController("other").list_adapters()


async def test_errors_arrive_as_themselves(served: Served) -> None:
    backend = served.backend()
    source = served.write_adapter("refused", "x")
    with pytest.raises(AdapterRejectedError) as caught:
        await backend.load_adapter(LoadAdapter(name="refused", source=source))
    assert set(caught.value.reasons.values()) == {"uses DoRA"}
    with pytest.raises(PathNotAllowedError):
        await backend.load_adapter(LoadAdapter(name="evil", source="/etc"))
    with pytest.raises(AdapterNotFoundError):
        await run(backend, "nobody-knows")
    with pytest.raises(AdapterNotFoundError):
        await run(backend, "../adapters/refused")


async def test_first_requests_resolve_a_name_once(served: Served) -> None:
    backend = served.backend()
    served.write_adapter("by-name", "x")
    seen = await replicas_seen(backend, "by-name", 24)
    assert len({generation for generations in seen.values() for generation in generations}) == 1


async def test_abandoned_request_leaves_the_engine(served: Served) -> None:
    backend = served.backend()
    stream = cast("Any", backend.generate(request(None, max_tokens=1000)))
    async with aclosing(stream) as items:
        await anext(items)
        await anext(items)
    await until_idle(backend)


async def until_idle(backend: RayBackend) -> None:
    deadline = time.monotonic() + 10
    while sum(r.num_running for r in await backend.list_replicas()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


@pytest.fixture
async def traffic(served: Served) -> AsyncIterator[list[Exception]]:
    """Requests for the base model all the time; yields the errors that they met."""
    backend, errors, is_over = served.backend(), [], asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            try:
                await run(backend, None)
            except (ClusterError, RayError) as error:
                errors.append(error)

    clients = [asyncio.create_task(client()) for _ in range(2)]
    yield errors
    is_over.set()
    await asyncio.gather(*clients)


async def test_controller_killed_between_operations_keeps_its_word(
    served: Served, traffic: list[Exception]
) -> None:
    backend = served.backend()
    before = await backend.load_adapter(
        LoadAdapter(name="kept", source=served.write_adapter("kept", "x"))
    )
    controller = find_or_create_controller(served.deployed)
    os.kill(await controller.process_id.remote(), signal.SIGKILL)
    after = await backend.load_adapter(
        LoadAdapter(name="later", source=served.write_adapter("later", "y"))
    )
    assert after.generation > before.generation
    for name, version in (("kept", before), ("later", after)):
        for generations in (await replicas_seen(backend, name, 12)).values():
            assert generations == {version.generation}
    assert traffic == []


async def test_requests_for_adapters_do_not_wait_for_the_controller(served: Served) -> None:
    backend = served.backend()
    version = await backend.load_adapter(
        LoadAdapter(name="steady", source=served.write_adapter("steady", "s"))
    )
    controller = find_or_create_controller(served.deployed)
    pid = await controller.process_id.remote()
    os.kill(pid, signal.SIGSTOP)
    try:
        # Well within a lease.
        async with asyncio.timeout(served.config.cluster.lease_s / 2):
            seen = await replicas_seen(backend, "steady", 24)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(seen) == 2
    assert set().union(*seen.values()) == {version.generation}


async def test_killed_replica_is_replaced_by_one_that_knows_everything(served: Served) -> None:
    backend = served.backend()
    version = await backend.load_adapter(
        LoadAdapter(name="known", source=served.write_adapter("known", "x"), pin=True)
    )
    victim = next(iter(await replicas_seen(backend, "known", 12)))
    kill_replica(victim)
    # Neither requests nor operations wait for it longer than it takes to notice.
    started = time.monotonic()
    replaced = await backend.load_adapter(
        LoadAdapter(
            name="known", source=served.write_adapter("known2", "y"), load_inplace=True, pin=True
        )
    )
    assert time.monotonic() - started < served.config.cluster.lease_s
    assert replaced.generation > version.generation
    deadline = time.monotonic() + 60
    while True:
        seen = await replicas_seen(backend, "known", 12)
        assert set().union(*seen.values()) == {replaced.generation}
        if len(seen) == 2 and victim not in seen:
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


async def test_only_a_process_whose_node_is_reached_is_certainly_dead(served: Served) -> None:
    @ray.remote(num_cpus=0)
    class Process: ...

    def start(name: str) -> Any:
        return Process.options(name=name, namespace="serve").remote()  # type: ignore[attr-defined]

    names = ["ended", "unreached", "alive"]
    actors = {name: start(name) for name in names}
    await asyncio.gather(*(actor.__ray_ready__.remote() for actor in actors.values()))
    here = ray.get_runtime_context().get_node_id()
    for name in ("ended", "unreached"):
        ray.kill(actors[name])
    nodes = {"ended": here, "unreached": "0" * 56, "alive": here}
    dead: set[str] = set()
    async with asyncio.timeout(30):
        while not dead:
            dead = await RayLiveness().find_dead(nodes)
    assert dead == {"ended"}


def kill_replica(replica_id: str) -> None:
    name = f"SERVE_REPLICA::{APP}#{REPLICAS}#{replica_id}"
    ray.kill(ray.get_actor(name, namespace="serve"))


async def test_replicas_replaced_while_adapters_change_know_the_last_state(
    served: Served,
) -> None:
    backend = served.backend()
    deploying = asyncio.create_task(asyncio.to_thread(served.run, 3))
    versions = {}
    index = 0
    while not deploying.done() or index < 10:
        name = f"wave-{index % 3}"
        source = served.write_adapter(f"wave{index}", str(index))
        versions[name] = await backend.load_adapter(
            LoadAdapter(name=name, source=source, load_inplace=True)
        )
        index += 1
    await deploying
    for name, version in versions.items():
        for generations in (await replicas_seen(backend, name, 18)).values():
            assert generations == {version.generation}
    assert len(await backend.list_replicas()) >= 3
