"""A replica's side of the agreement: its lease, its table, and what it prepares.

Runs as its own task, never behind user requests. A request for an adapter is admitted only while
the lease holds, so the controller need not wait for a replica that it cannot reach.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from adapters import AdapterVersion, LoRARequest
from deployments.adapter_table import AdapterTable
from deployments.aliases import split_adapter
from deployments.clock import Clock, Signal
from deployments.cluster_protocol import (
    ForcedEnd,
    LeaseLostError,
    PrepareCommand,
    PrepareReport,
    Register,
    RegisterAnswer,
    ReplicaPort,
    TableUpdate,
    Watch,
    WatchAnswer,
)
from deployments.engine_port import AdapterEngine
from deployments.errors import (
    AdapterNotFoundError,
    ClusterError,
    GenerationNotFoundError,
    ReplicaUnavailableError,
    ResolverUnavailableError,
)
from deployments.local_adapters import LoadedAdapter, LocalAdapters
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.model_profile import ModelProfile
from deployments.sources import AdapterSources
from engine.errors import CapacityError, EngineError

logger = logging.getLogger(__name__)

# The replica's view of its lease ends this much earlier than the controller's, for clocks whose
# rates differ a little. (It also counts from the sending, the controller from the receiving.)
_LEASE_MARGIN = 0.05
_RETRY_S = 0.2
# How often the whole table is compared with the controller's.
_CHECK_S = 30.0
# Adapters prepared at the same time when joining.
_MAX_WARMING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedAdapter:
    """An adapter that the engine knows and that stays until its request ends."""

    version: AdapterVersion
    lora: LoRARequest
    profile: ModelProfile


@dataclass(slots=True, kw_only=True)
class _Prepare:
    command: PrepareCommand
    task: asyncio.Task[None]
    report: PrepareReport | None = None


class ReplicaLink:
    """Keeps one replica a member and its table current."""

    def __init__(
        self,
        identity: Register,
        port: ReplicaPort,
        engine: AdapterEngine,
        sources: AdapterSources,
        *,
        clock: Clock,
        abort_running: Callable[[ForcedEnd], Awaitable[None]],
        metrics: ReplicaMetrics | None = None,
    ) -> None:
        self._identity = identity
        self._port = port
        self._clock = clock
        self._abort_running = abort_running
        self._metrics = metrics
        self.table = AdapterTable(self._on_unused)
        self.adapters = LocalAdapters(
            engine,
            sources,
            self.table.is_used,
            observe_load=None if metrics is None else metrics.observe_load,
        )
        self._applied = Signal(clock)
        self._lease_until = -math.inf
        self._lease_s = 0.0
        self._check_at = -math.inf
        self._prepares: dict[str, _Prepare] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def holds_lease(self) -> bool:
        """Whether this replica may admit requests for adapters."""
        return self._clock.now() < self._lease_until

    async def join(self) -> None:
        """Adopt the cluster's state; returns when the replica is ready for requests."""
        answer = await self._register()
        self._watching = asyncio.create_task(self._watch_forever())
        names = {*answer.warm_names, *(version.name for version in self.table.pinned())}
        await self._warm(sorted(names))

    async def leave(self) -> None:
        """Stop admitting and end the membership."""
        self._lease_until = -math.inf
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        await self._port.leave(self._identity.member)

    # -- requests

    @asynccontextmanager
    async def admit(self, adapter: str, split_key: str = "") -> AsyncIterator[AdmittedAdapter]:
        """Let a request start on what the name means now, and keep that version until it ends.

        ``adapter`` is a name, ``name@generation``, or an alias; ``split_key`` decides among the
        adapters that an alias stands for.
        """
        name, _ = split_adapter(adapter)
        while not self._knows(name):
            await self._resolve(name)
        # From the lease check to the hold nothing awaits: what is looked up was in service when
        # the request started.
        if not self.holds_lease:
            raise ReplicaUnavailableError("this replica lost contact with the controller")
        version = self._version_of(adapter, split_key)
        with self.table.hold(version.digest):
            async with self.adapters.use(version.name, version.digest, version.source_uri) as used:
                yield _admitted(version, used)

    def _version_of(self, adapter: str, split_key: str) -> AdapterVersion:
        """What a request runs on that starts now."""
        alias = self.table.find_alias(adapter)
        name, generation = split_adapter(adapter if alias is None else alias.choose(split_key))
        current = self.table.find(name)
        if current is None:
            raise AdapterNotFoundError(adapter)
        if generation is None:
            return current
        kept = self.table.find_kept(name, generation)
        if kept is None:
            raise GenerationNotFoundError(name, generation, current.generation)
        return kept

    def _knows(self, name: str) -> bool:
        return self.table.find(name) is not None or self.table.find_alias(name) is not None

    async def _resolve(self, name: str) -> None:
        """Learn a name from the controller, once for all requests that wait for it."""
        task = self._resolving.get(name)
        if task is None:
            task = self._resolving[name] = self._spawn(self._ask(name))
            task.add_done_callback(lambda _: self._resolving.pop(name))
        await asyncio.wait((task,))
        if self._knows(name):
            return
        # The controller may have answered before this request was made, and since then the name
        # was loaded. Only while the lease holds would the table say so.
        if not self.holds_lease:
            raise ReplicaUnavailableError("this replica lost contact with the controller")
        task.result()

    async def _ask(self, name: str) -> None:
        resolved = await self._port.resolve(name, self._identity.member)
        deadline = self._clock.now() + self._lease_s
        if not await self._applied.wait_until(
            lambda: self.table.table_version >= resolved.table_version, deadline=deadline
        ):
            raise ReplicaUnavailableError("this replica lost contact with the controller")

    # -- agreement

    async def _register(self) -> RegisterAnswer:
        sent_at = self._clock.now()
        answer = await self._port.register(self._identity)
        self._apply(answer.update)
        self._renewed(sent_at, answer.lease_s)
        # Reports sent while this replica was no member were not taken in.
        for op_id, prepare in self._prepares.items():
            if prepare.report is not None:
                self._spawn(self._send_report(op_id, prepare.report))
        return answer

    async def _watch_forever(self) -> None:
        while True:
            try:
                await self._watch()
            except LeaseLostError:
                await self._register_again()
            except Exception:
                logger.exception("cannot reach the controller, trying again")
                await self._clock.sleep(_RETRY_S)

    async def _register_again(self) -> None:
        try:
            await self._register()
        except Exception:
            logger.exception("cannot register with the controller, trying again")
            await self._clock.sleep(_RETRY_S)

    async def _watch(self) -> None:
        num_running, num_waiting = self.adapters.load()
        watch = Watch(
            member=self._identity.member,
            journal_id=self.table.journal_id,
            table_version=self.table.table_version,
            known_operations=frozenset(self._prepares),
            residency=self.adapters.residency(),
            num_running=num_running,
            num_waiting=num_waiting,
            fingerprint=self._fingerprint_if_due(),
            metrics=b"" if self._metrics is None else self._metrics.snapshot(),
        )
        sent_at = self._clock.now()
        self._take(await self._port.watch(watch), sent_at)

    def _fingerprint_if_due(self) -> int | None:
        """Now and then only: with 10,000 names it takes as long as a few tokens."""
        if self._clock.now() < self._check_at:
            return None
        self._check_at = self._clock.now() + _CHECK_S
        return self.table.fingerprint()

    def _take(self, answer: WatchAnswer, sent_at: float) -> None:
        # The table comes first: it keeps what a committed prepare made ready, and the lease means
        # that the table is current.
        if answer.update is not None:
            self._apply(answer.update)
        announced = {command.op_id for command in answer.preparing}
        for op_id in self._prepares.keys() - announced:
            self._end_prepare(self._prepares.pop(op_id))
        for command in answer.preparing:
            if command.op_id not in self._prepares:
                self._begin_prepare(command)
        self._spawn(self.adapters.set_pins(self._wanted_pins))
        self._renewed(sent_at, answer.lease_s)

    def _renewed(self, sent_at: float, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lease_until = sent_at + lease_s * (1 - _LEASE_MARGIN)

    def _apply(self, update: TableUpdate) -> None:
        self.table.apply(update)
        for end in update.forced:
            self._spawn(self._abort_running(end))
        self._applied.notify()

    # -- prepares

    def _begin_prepare(self, command: PrepareCommand) -> None:
        self.table.acquire(command.digest)
        task = self._spawn(self._prepare(command))
        self._prepares[command.op_id] = _Prepare(command=command, task=task)

    def _end_prepare(self, prepare: _Prepare) -> None:
        # Work that goes on keeps its bytes until it is through: the engine may be amid loading.
        digest = prepare.command.digest
        if prepare.task.done():
            self.table.release(digest)
        else:
            prepare.task.add_done_callback(lambda _: self.table.release(digest))

    async def _prepare(self, command: PrepareCommand) -> None:
        report = await self._try_prepare(command)
        prepare = self._prepares.get(command.op_id)
        if prepare is not None:
            prepare.report = report
            await self._send_report(command.op_id, report)

    async def _try_prepare(self, command: PrepareCommand) -> PrepareReport:
        try:
            loaded = await self.adapters.ensure(command.name, command.digest, command.source_uri)
            if command.pinned:
                await self.adapters.pin(command.digest)
        except CapacityError as error:
            return PrepareReport(rejection=str(error), no_room=True)
        except ResolverUnavailableError as error:
            return PrepareReport(rejection=str(error), retryable=True)
        except (EngineError, ClusterError) as error:
            return PrepareReport(rejection=str(error))
        except Exception as error:
            logger.exception("cannot prepare adapter %s", command.name)
            return PrepareReport(rejection=f"internal error: {type(error).__name__}")
        return PrepareReport(rank=loaded.rank, size_bytes=loaded.size_bytes)

    async def _send_report(self, op_id: str, report: PrepareReport) -> None:
        while op_id in self._prepares:
            try:
                return await self._port.report(self._identity.member, op_id, report)
            except Exception:
                logger.exception("cannot report to the controller, trying again")
                await self._clock.sleep(_RETRY_S)

    def _wanted_pins(self) -> set[str]:
        preparing = {p.command.digest for p in self._prepares.values() if p.command.pinned}
        return {version.digest for version in self.table.pinned()} | preparing

    # -- residency

    async def _warm(self, names: list[str]) -> None:
        places = asyncio.Semaphore(_MAX_WARMING)

        async def warm(name: str) -> None:
            version = self.table.find(name)
            if version is None:
                return
            async with places:
                try:
                    await self.adapters.ensure(name, version.digest, version.source_uri)
                except Exception:
                    # One bad adapter must not keep a replica from serving all others.
                    logger.exception("cannot prepare adapter %s", name)

        await asyncio.gather(*map(warm, names))
        await self.adapters.set_pins(self._wanted_pins)

    def _on_unused(self, digest: str) -> None:
        self._spawn(self.adapters.forget_unused(digest))

    def _spawn(self, work: Coroutine[Any, Any, None] | Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _admitted(version: AdapterVersion, loaded: LoadedAdapter) -> AdmittedAdapter:
    lora = LoRARequest(
        lora_name=version.name,
        lora_path=loaded.request.lora_path,
        digest=version.digest,
        generation=version.generation,
        source_uri=version.source_uri,
        base_model_name=version.base_model,
    )
    return AdmittedAdapter(version=version, lora=lora, profile=loaded.profile)
