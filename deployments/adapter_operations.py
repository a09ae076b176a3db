"""What load, unload, pin, rollback and first-request look-up do to a name, step by step.

Operations on one name run in order, on different names side by side. Each runs to its end even if
its caller goes away, and a repeated call joins or recognises it. The agreement of the replicas is
``two_phase.py``'s.
"""

import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from adapters import AdapterVersion, LoRARequest
from deployments.backend import (
    AdapterState,
    LoadAdapter,
    PinAdapter,
    RollBackAdapter,
    UnloadAdapter,
)
from deployments.clock import Clock
from deployments.cluster_protocol import MemberId, PrepareReport
from deployments.controller_settings import ControllerSettings
from deployments.errors import (
    AdapterAlreadyLoadedError,
    AdapterInUseError,
    AdapterNotFoundError,
    AdapterRejectedError,
    AdapterSourceError,
    ClusterError,
    GenerationNotFoundError,
    NameConflictError,
    NoEarlierVersionError,
    OverloadedError,
    ResolverUnavailableError,
)
from deployments.keyed_lock import KeyedLock
from deployments.negative_cache import NegativeCache
from deployments.operation_runner import OperationRunner
from deployments.operations import (
    Operation,
    OperationKind,
    OperationPhase,
    describe_request,
)
from deployments.push_store import PushStore
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
        pushes: PushStore,
        store: StateStore,
        agreement: TwoPhase,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.sources = sources
        self.pushes = pushes
        self.in_progress: dict[str, tuple[AdapterState, Operation]] = {}
        self._store = store
        self._agreement = agreement
        self._clock = clock
        self.names = KeyedLock()
        self.runner = OperationRunner(store, clock)
        self._not_found = NegativeCache(settings.negative_ttl_s, clock)
        self._lookups = RateLimit(settings.max_lookups_per_s, clock)

    def recover(self, open_operations: tuple[Operation, ...]) -> None:
        """Roll operations that were in doubt when the last controller ended back or forward."""
        for operation in open_operations:
            if operation.phase is OperationPhase.PREPARING:
                self._agreement.abort(operation, "the controller restarted")
            else:
                # Not under the operation's id: who repeats its call wants the result, and waits
                # for the name like everyone.
                self.runner.start(f"recover {operation.op_id}", self._roll_forward(operation))

    async def load(self, load: LoadAdapter, op_id: str) -> AdapterVersion:
        """Put an adapter in service on every live replica."""
        source = load.digest if load.upload else load.source
        request = describe_request(source, load.load_inplace, load.pin)
        called = self.runner.called(op_id, OperationKind.LOAD, load, request, pinned=load.pin)
        return await self._run(called, lambda: self._load_held(load, called))

    async def unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        """Take a name out of service on every live replica."""
        request = describe_request(unload.force)
        called = self.runner.called(op_id, OperationKind.UNLOAD, unload, request)
        version = await self._run(called, lambda: self._unload(unload, called), unload.timeout_s)
        await self.pushes.remove_unused(self._agreement.desired.digests)
        return version

    async def pin(self, pin: PinAdapter, op_id: str) -> AdapterVersion:
        """Keep a name's weights in memory everywhere, or let them go when there is no room."""
        request = describe_request(pin.pinned)
        called = self.runner.called(op_id, OperationKind.PIN, pin, request, pinned=pin.pinned)
        return await self._run(called, lambda: self._pin(pin, called))

    async def roll_back(self, rollback: RollBackAdapter, op_id: str) -> AdapterVersion:
        """Put an earlier version's bytes in service again."""
        request = describe_request(rollback.generation)
        called = self.runner.called(op_id, OperationKind.ROLLBACK, rollback, request)
        return await self._run(called, lambda: self._roll_back(rollback, called))

    async def resolve(self, name: str, member: MemberId) -> None:
        """Register an unknown name if a resolver knows it; one look-up for all who ask."""
        self._not_found.raise_for(name)
        key = f"resolve {name}"  # no operation's id: it has a space
        limit_s = self.settings.operation_timeout_s
        await self.runner.share(key, name, lambda: self._resolve(name, member), limit_s)

    async def _run(
        self,
        called: Operation,
        work: Callable[[], Coroutine[Any, Any, AdapterVersion]],
        timeout_s: float | None = None,
    ) -> AdapterVersion:
        limit_s = self.settings.operation_timeout_s if timeout_s is None else timeout_s
        return await self.runner.run(called, work, limit_s)

    # -- load

    async def _load_held(self, load: LoadAdapter, called: Operation) -> AdapterVersion:
        if not load.upload:
            return await self._load(load, called)
        try:
            with self.pushes.hold(load.digest):
                return await self._load(load, called)
        finally:
            await self.pushes.remove_unused(self._agreement.desired.digests)

    async def _load(self, load: LoadAdapter, called: Operation) -> AdapterVersion:
        async with self.names.hold(load.name):
            past = self._find_committed(called.op_id)
            if past is not None:
                return past
            if load.name in self._agreement.desired.aliases:
                raise NameConflictError(load.name, "is an alias and cannot name an adapter.")
            current = self._agreement.desired.adapters.get(load.name)
            if current is not None and not load.load_inplace:
                raise AdapterAlreadyLoadedError(load.name)
            found = await self._find_source(load)
            is_same = current is not None and _serves(current, found)
            if current is not None and is_same and current.pinned == load.pin:
                await self._agreement.settle_table()
                self.runner.record(called, phase=OperationPhase.DONE, version=current)
                return current
            operation = await self._begin(called, found)
            with self._progress(operation, replacing=current is not None):
                same = replace(current, pinned=load.pin) if current and is_same else None
                committed = await self._prepare_and_commit(operation, only=None, version=same)
                await self._agreement.settle(committed)
            assert committed.version is not None
            return committed.version

    async def _find_source(self, load: LoadAdapter) -> LoRARequest:
        if load.upload:
            return await self.pushes.take_over(load.name, load.upload, load.digest)
        if load.source is not None:
            return await self.sources.open(load.name, load.source)
        found = await self.sources.find(load.name)
        if found is None:
            raise AdapterNotFoundError(load.name, param="lora_name")
        return found

    async def _begin(self, operation: Operation, found: LoRARequest) -> Operation:
        return await self._store.begin(
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
            return await self._commit(operation, version or self._new_version(operation, report))
        except BaseException as error:
            reasons = error.reasons if isinstance(error, ClusterError) else None
            self._agreement.abort(operation, str(error) or type(error).__name__, reasons)
            raise

    async def _commit(self, operation: Operation, version: AdapterVersion) -> Operation:
        keep = self.settings.max_versions_kept
        committed = await self._agreement.commit(operation, version, keep=keep)
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
        async with self.names.hold(unload.name):
            past = self._find_committed(called.op_id)
            if past is not None:
                return past
            current = self._current(unload.name)
            alias = self._agreement.desired.alias_of(unload.name)
            if alias is not None:
                raise AdapterInUseError(unload.name, alias)
            operation = await self._store.begin(
                replace(called, digest=current.digest, source_uri=current.source_uri)
            )
            committed = await self._agreement.commit(operation, current, forget=True)
            with self._progress(committed, replacing=False):
                await self._agreement.settle(committed)
            return current

    # -- pin and rollback

    async def _pin(self, pin: PinAdapter, called: Operation) -> AdapterVersion:
        async with self.names.hold(pin.name):
            past = self._find_committed(called.op_id)
            if past is not None:
                return past
            current = self._current(pin.name)
            if current.pinned == pin.pinned:
                await self._agreement.settle_table()
                self.runner.record(called, phase=OperationPhase.DONE, version=current)
                return current
            return await self._put_again(called, current, replace(current, pinned=pin.pinned))

    async def _roll_back(self, rollback: RollBackAdapter, called: Operation) -> AdapterVersion:
        async with self.names.hold(rollback.name):
            past = self._find_committed(called.op_id)
            if past is not None:
                return past
            current = self._current(rollback.name)
            earlier = self._earlier(current, rollback.generation)
            if earlier.digest == current.digest:
                await self._agreement.settle_table()
                self.runner.record(called, phase=OperationPhase.DONE, version=current)
                return current
            # A new generation: they only grow, so that a later answer never has an earlier one.
            again = replace(
                earlier,
                generation=0,
                pinned=current.pinned,
                created_at=self._clock.wall(),
                created_by=called.requested_by or called.kind.value,
            )
            return await self._put_again(called, current, again)

    def _earlier(self, current: AdapterVersion, generation: int | None) -> AdapterVersion:
        kept = self._agreement.desired.kept.get(current.name, ())
        if generation is None:
            others = [version for version in kept if version.digest != current.digest]
            if not others:
                raise NoEarlierVersionError(current.name)
            return others[0]
        for version in (current, *kept):
            if version.generation == generation:
                return version
        raise GenerationNotFoundError(current.name, generation, current.generation)

    async def _put_again(
        self, called: Operation, current: AdapterVersion, version: AdapterVersion
    ) -> AdapterVersion:
        """Put known bytes in service; generation 0 stands for a new one."""
        operation = await self._store.begin(
            replace(
                called,
                digest=version.digest,
                source_uri=version.source_uri,
                pinned=version.pinned,
            )
        )
        if not version.generation:
            version = replace(version, generation=operation.generation)
        is_replaced = version.generation != current.generation
        with self._progress(operation, replacing=is_replaced):
            committed = await self._prepare_and_commit(operation, only=None, version=version)
            await self._agreement.settle(committed)
        return version

    def _current(self, name: str) -> AdapterVersion:
        current = self._agreement.desired.adapters.get(name)
        if current is None:
            raise AdapterNotFoundError(name, param="lora_name")
        return current

    # -- first request

    async def _resolve(self, name: str, member: MemberId) -> AdapterVersion | None:
        async with self.names.hold(name):
            desired = self._agreement.desired
            if name in desired.adapters:
                return desired.adapters[name]
            if name in desired.aliases:
                return None
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
        operation = await self._begin(
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

    async def _roll_forward(self, operation: Operation) -> None:
        async with self.names.hold(operation.name):
            await self._agreement.settle(operation)

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
