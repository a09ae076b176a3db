"""What load, unload and first-request look-up do to a name, step by step.

Operations on one name run in order, on different names side by side. Each runs to its end even if
its caller goes away, and a repeated call joins or recognises it. The agreement of the replicas is
``two_phase.py``'s.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from adapters import AdapterVersion, LoRARequest
from deployments.backend import AdapterState, LoadAdapter, UnloadAdapter
from deployments.clock import Clock
from deployments.cluster_protocol import MemberId, PrepareReport
from deployments.controller_settings import ControllerSettings
from deployments.errors import (
    AdapterAlreadyLoadedError,
    AdapterNotFoundError,
    AdapterRejectedError,
    AdapterSourceError,
    OperationTimeoutError,
    OverloadedError,
    ResolverUnavailableError,
)
from deployments.keyed_lock import KeyedLock
from deployments.negative_cache import NegativeCache
from deployments.operations import Operation, OperationKind, OperationPhase
from deployments.rate_limit import RateLimit
from deployments.sources import AdapterSources
from deployments.state_store import StateStore
from deployments.two_phase import TwoPhase

# Outcomes of a look-up that the next callers share for a while.
_REMEMBERED = (
    AdapterNotFoundError,
    AdapterRejectedError,
    AdapterSourceError,
    ResolverUnavailableError,
)


class AdapterOperations:
    """Runs operations on names."""

    def __init__(
        self,
        settings: ControllerSettings,
        sources: AdapterSources,
        store: StateStore,
        agreement: TwoPhase,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.sources = sources
        self.in_progress: dict[str, tuple[AdapterState, Operation]] = {}
        self._store = store
        self._agreement = agreement
        self._clock = clock
        self._names = KeyedLock()
        self._tasks: dict[str, asyncio.Task[AdapterVersion]] = {}
        self._not_found = NegativeCache(settings.negative_ttl_s, clock)
        self._lookups = RateLimit(settings.max_lookups_per_s, clock)

    def recover(self, open_operations: tuple[Operation, ...]) -> None:
        """Roll operations that were in doubt when the last controller ended back or forward."""
        for operation in open_operations:
            if operation.phase is OperationPhase.PREPARING:
                self._agreement.abort(operation, "the controller restarted")
            else:
                self._start(operation.op_id, self._roll_forward(operation))

    async def load(self, load: LoadAdapter, op_id: str) -> AdapterVersion:
        """Put an adapter in service on every live replica."""
        return await self._run(op_id, load.name, lambda: self._load(load, op_id))

    async def unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        """Take a name out of service on every live replica."""
        return await self._run(
            op_id, unload.name, lambda: self._unload(unload, op_id), unload.timeout_s
        )

    async def resolve(self, name: str, member: MemberId) -> None:
        """Register an unknown name if a resolver knows it; one look-up for all who ask."""
        self._not_found.raise_for(name)
        await self._run(f"resolve {name}", name, lambda: self._resolve(name, member))

    # -- running

    async def _run(
        self,
        key: str,
        name: str,
        operation: Callable[[], Coroutine[Any, Any, AdapterVersion]],
        timeout_s: float | None = None,
    ) -> AdapterVersion:
        task = self._tasks.get(key) or self._start(key, operation())
        limit_s = self.settings.operation_timeout_s if timeout_s is None else timeout_s
        done, _ = await asyncio.wait((task,), timeout=limit_s)
        if not done:
            raise OperationTimeoutError(name, limit_s, "it goes on")
        return task.result()

    def _start(
        self, key: str, operation: Coroutine[Any, Any, AdapterVersion]
    ) -> asyncio.Task[AdapterVersion]:
        task = self._tasks[key] = asyncio.ensure_future(operation)

        def forget(task: asyncio.Task[AdapterVersion]) -> None:
            del self._tasks[key]
            if not task.cancelled():
                task.exception()  # Seen, even if every caller went away.

        task.add_done_callback(forget)
        return task

    # -- load

    async def _load(self, load: LoadAdapter, op_id: str) -> AdapterVersion:
        async with self._names.hold(load.name):
            past = self._find_committed(op_id)
            if past is not None:
                return past
            current = self._agreement.desired.adapters.get(load.name)
            if current is not None and not load.load_inplace:
                raise AdapterAlreadyLoadedError(load.name)
            found = await self._find_source(load)
            is_same = current is not None and _serves(current, found)
            if current is not None and is_same and current.pinned == load.pin:
                await self._agreement.settle_table()
                return current
            operation = self._begin(
                Operation(
                    op_id=op_id,
                    kind=OperationKind.LOAD,
                    name=load.name,
                    pinned=load.pin,
                    requested_by=load.requested_by,
                    requested_from=load.requested_from,
                ),
                found,
            )
            with self._progress(operation, replacing=current is not None):
                same = replace(current, pinned=load.pin) if current and is_same else None
                committed = await self._prepare_and_commit(operation, only=None, version=same)
                await self._agreement.settle(committed)
            assert committed.version is not None
            return committed.version

    async def _find_source(self, load: LoadAdapter) -> LoRARequest:
        if load.source is not None:
            return await self.sources.open(load.name, load.source)
        found = await self.sources.find(load.name)
        if found is None:
            raise AdapterNotFoundError(load.name, param="lora_name")
        return found

    def _begin(self, operation: Operation, found: LoRARequest) -> Operation:
        return self._store.begin(
            replace(
                operation,
                digest=found.digest or "",
                source_uri=found.source_uri or "",
                started_at=self._clock.wall(),
            )
        )

    async def _prepare_and_commit(
        self,
        operation: Operation,
        *,
        only: MemberId | None,
        version: AdapterVersion | None = None,
    ) -> Operation:
        try:
            report = await self._agreement.prepare(
                operation, only=only, timeout_s=self.settings.prepare_timeout_s
            )
            return self._commit(operation, version or self._new_version(operation, report))
        except BaseException as error:
            self._agreement.abort(operation, str(error) or type(error).__name__)
            raise

    def _commit(self, operation: Operation, version: AdapterVersion) -> Operation:
        committed = self._agreement.commit(operation, version)
        self._not_found.forget(operation.name)
        return committed

    def _new_version(self, operation: Operation, report: PrepareReport) -> AdapterVersion:
        return AdapterVersion(
            name=operation.name,
            generation=operation.generation,
            digest=operation.digest,
            source_uri=operation.source_uri,
            base_model=self.settings.base_model,
            rank=report.rank,
            size_bytes=report.size_bytes,
            pinned=operation.pinned,
            created_at=self._clock.wall(),
            created_by=operation.requested_by or operation.kind.value,
        )

    # -- unload

    async def _unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        async with self._names.hold(unload.name):
            past = self._find_committed(op_id)
            if past is not None:
                return past
            current = self._agreement.desired.adapters.get(unload.name)
            if current is None:
                raise AdapterNotFoundError(unload.name, param="lora_name")
            operation = self._store.begin(
                Operation(
                    op_id=op_id,
                    kind=OperationKind.UNLOAD,
                    name=unload.name,
                    digest=current.digest,
                    source_uri=current.source_uri,
                    requested_by=unload.requested_by,
                    requested_from=unload.requested_from,
                    started_at=self._clock.wall(),
                )
            )
            committed = self._agreement.commit(
                operation, current, forget=True, abort_running=unload.force
            )
            with self._progress(committed, replacing=False):
                await self._agreement.settle(committed)
            return current

    # -- first request

    async def _resolve(self, name: str, member: MemberId) -> AdapterVersion:
        async with self._names.hold(name):
            desired = self._agreement.desired
            if name in desired.adapters:
                return desired.adapters[name]
            if name in desired.unloaded:
                raise AdapterNotFoundError(name)
            try:
                return await self._register(name, member)
            except _REMEMBERED as error:
                self._not_found.put(name, error)
                raise

    async def _register(self, name: str, member: MemberId) -> AdapterVersion:
        # Wrong names come as they like; how many are looked up at once is the resolvers' matter.
        if not self._lookups.try_take():
            raise OverloadedError("too many unknown adapters are asked for, try again")
        found = await self.sources.find(name)
        if found is None:
            raise AdapterNotFoundError(name)
        operation = self._begin(
            Operation(
                op_id=uuid.uuid4().hex,
                kind=OperationKind.RESOLVE,
                name=name,
                requested_from=member.replica_id,
            ),
            found,
        )
        with self._progress(operation, replacing=False):
            committed = await self._prepare_and_commit(operation, only=member)
        # Nobody was promised that all replicas know the name now: each learns it by its watch, or
        # asks here.
        self._agreement.finish(committed)
        assert committed.version is not None
        return committed.version

    # -- repeats and restarts

    def _find_committed(self, op_id: str) -> AdapterVersion | None:
        past = self._store.find_operation(op_id)
        return past.version if past is not None and past.phase.is_committed else None

    async def _roll_forward(self, operation: Operation) -> AdapterVersion:
        async with self._names.hold(operation.name):
            await self._agreement.settle(operation)
        assert operation.version is not None
        return operation.version

    @contextmanager
    def _progress(self, operation: Operation, *, replacing: bool) -> Iterator[None]:
        state = AdapterState.REPLACING if replacing else AdapterState.PREPARING
        if operation.kind is OperationKind.UNLOAD:
            state = AdapterState.UNLOADING
        self.in_progress[operation.name] = (state, operation)
        try:
            yield
        finally:
            del self.in_progress[operation.name]


def _serves(version: AdapterVersion, found: LoRARequest) -> bool:
    return version.digest == found.digest and version.source_uri == found.source_uri
