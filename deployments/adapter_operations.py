"""What load, unload and first-request look-up do to a name, step by step.

Operations on one name run in order, on different names side by side. Each runs to its end even if
its caller goes away, and a repeated call joins or recognises it. The agreement of the replicas is
``two_phase.py``'s.
"""

import asyncio
import logging
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
    ClusterError,
    JournalUnavailableError,
    OperationConflictError,
    OperationTimeoutError,
    OverloadedError,
    ResolverUnavailableError,
)
from deployments.keyed_lock import KeyedLock
from deployments.negative_cache import NegativeCache
from deployments.operations import (
    Operation,
    OperationKind,
    OperationPhase,
    OperationQuery,
    describe_request,
)
from deployments.rate_limit import RateLimit
from deployments.sources import AdapterSources
from deployments.state_store import StateStore
from deployments.two_phase import TwoPhase

logger = logging.getLogger(__name__)

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
        self._called: dict[str, Operation] = {}
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
        called = self._call(
            op_id,
            OperationKind.LOAD,
            load,
            describe_request(load.source, load.load_inplace, load.pin),
            pinned=load.pin,
        )
        return await self._run(called, lambda: self._load(load, called))

    async def unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        """Take a name out of service on every live replica."""
        called = self._call(op_id, OperationKind.UNLOAD, unload, describe_request(unload.force))
        return await self._run(called, lambda: self._unload(unload, called), unload.timeout_s)

    async def resolve(self, name: str, member: MemberId) -> None:
        """Register an unknown name if a resolver knows it; one look-up for all who ask."""
        self._not_found.raise_for(name)
        key = f"resolve {name}"  # no operation's id: it has a space
        task = self._tasks.get(key) or self._start(key, self._resolve(name, member))
        await self._wait(task, name, None, key="")

    def list_running(self, query: OperationQuery) -> list[Operation]:
        """Operations that wait for their turn or their source, latest first."""
        waiting = [
            operation
            for operation in self._called.values()
            if not self._is_journaled(operation)
            and query.name in ("", operation.name)
            and query.phase in ("", operation.phase)
        ]
        return waiting[::-1]

    def find(self, op_id: str) -> Operation | None:
        """An operation that is under way or remembered."""
        called = self._called.get(op_id)
        if called is not None and not self._is_journaled(called):
            return called
        return self._store.find_operation(op_id)

    # -- running

    def _call(
        self,
        op_id: str,
        kind: OperationKind,
        asked: LoadAdapter | UnloadAdapter,
        request: str,
        *,
        pinned: bool = False,
    ) -> Operation:
        """The record of a call; raises if its id was given to another call."""
        called = Operation(
            op_id=op_id,
            kind=kind,
            name=asked.name,
            phase=OperationPhase.WAITING,
            pinned=pinned,
            requested_by=asked.requested_by,
            requested_from=asked.requested_from,
            started_at=self._clock.wall(),
            request=request,
        )
        past = self._called.get(op_id) or self._store.find_operation(op_id)
        is_over = past is not None and past.phase is OperationPhase.ABORTED
        if past is not None and not is_over and not called.is_repeat_of(past):
            raise OperationConflictError(op_id, f"the {past.kind} of {past.name!r}")
        return called

    async def _run(
        self,
        called: Operation,
        work: Callable[[], Coroutine[Any, Any, AdapterVersion]],
        timeout_s: float | None = None,
    ) -> AdapterVersion:
        """Wait for an operation's work, which goes on if the caller does not wait that long."""
        task = self._tasks.get(called.op_id)
        if task is None:
            self._called[called.op_id] = called
            task = self._start(called.op_id, self._recorded(called, work))
        return await self._wait(task, called.name, timeout_s, key=called.op_id)

    async def _wait(
        self, task: asyncio.Task[AdapterVersion], name: str, timeout_s: float | None, *, key: str
    ) -> AdapterVersion:
        limit_s = self.settings.operation_timeout_s if timeout_s is None else timeout_s
        done, _ = await asyncio.wait((task,), timeout=limit_s)
        if not done:
            raise OperationTimeoutError(name, limit_s, "it goes on", op_id=key)
        return task.result()

    async def _recorded(
        self, called: Operation, work: Callable[[], Coroutine[Any, Any, AdapterVersion]]
    ) -> AdapterVersion:
        """Do the work; what refused it before it began is remembered too."""
        try:
            return await work()
        except (ClusterError, ValueError) as error:
            logger.info("operation %s on %s was refused: %s", called.op_id, called.name, error)
            if not self._is_journaled(called):
                self._remember_refusal(called, error)
            raise
        finally:
            del self._called[called.op_id]

    def _is_journaled(self, called: Operation) -> bool:
        past = self._store.find_operation(called.op_id)
        return past is not None and past.started_at == called.started_at

    def _remember_refusal(self, called: Operation, error: Exception) -> None:
        past = self._store.find_operation(called.op_id)
        if past is None or past.phase is OperationPhase.ABORTED:
            self._record(called, phase=OperationPhase.ABORTED, detail=str(error))

    def _record(self, called: Operation, **outcome: Any) -> None:
        """Remember an operation that ended without a change."""
        try:
            self._store.record(replace(called, ended_at=self._clock.wall(), **outcome))
        except JournalUnavailableError:
            # Harmless: nothing was changed, and the caller is told.
            logger.warning("cannot record how operation %s ended", called.op_id)

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

    async def _load(self, load: LoadAdapter, called: Operation) -> AdapterVersion:
        async with self._names.hold(load.name):
            past = self._find_committed(called.op_id)
            if past is not None:
                return past
            current = self._agreement.desired.adapters.get(load.name)
            if current is not None and not load.load_inplace:
                raise AdapterAlreadyLoadedError(load.name)
            found = await self._find_source(load)
            is_same = current is not None and _serves(current, found)
            if current is not None and is_same and current.pinned == load.pin:
                await self._agreement.settle_table()
                self._record(called, phase=OperationPhase.DONE, version=current)
                return current
            operation = self._begin(called, found)
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
            replace(operation, digest=found.digest or "", source_uri=found.source_uri or "")
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
            reasons = error.reasons if isinstance(error, ClusterError) else None
            self._agreement.abort(operation, str(error) or type(error).__name__, reasons)
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

    async def _unload(self, unload: UnloadAdapter, called: Operation) -> AdapterVersion:
        async with self._names.hold(unload.name):
            past = self._find_committed(called.op_id)
            if past is not None:
                return past
            current = self._agreement.desired.adapters.get(unload.name)
            if current is None:
                raise AdapterNotFoundError(unload.name, param="lora_name")
            operation = self._store.begin(
                replace(called, digest=current.digest, source_uri=current.source_uri)
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
                started_at=self._clock.wall(),
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
