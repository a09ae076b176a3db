"""The one authority on what adapter names mean.

Answers replicas and operators and says who may do what. How an operation proceeds is
``adapter_operations.py``'s, how the replicas agree ``two_phase.py``'s; Ray is
``controller_actor.py``'s.
"""

import logging
from collections.abc import Iterator
from itertools import islice

from adapters import AdapterVersion, validate_adapter_name
from deployments.adapter_operations import AdapterOperations
from deployments.alias_operations import AliasOperations
from deployments.aliases import AdapterAlias
from deployments.backend import (
    ALL_ADAPTERS,
    AdapterQuery,
    AdapterState,
    AdapterStatus,
    ClusterMetrics,
    DeleteAlias,
    LoadAdapter,
    PinAdapter,
    ReplicaResidency,
    ReplicaStatus,
    RollBackAdapter,
    SetAlias,
    UnloadAdapter,
)
from deployments.clock import Clock
from deployments.cluster_protocol import (
    Liveness,
    MemberId,
    PrepareReport,
    Register,
    RegisterAnswer,
    Resolved,
    Watch,
    WatchAnswer,
)
from deployments.controller_settings import ControllerSettings
from deployments.errors import (
    AdapterNotFoundError,
    NameConflictError,
    OperationNotFoundError,
    RuntimeUpdatingDisabledError,
)
from deployments.metrics.controller_metrics import MAX_ADAPTERS, ControllerMetrics, FleetView
from deployments.operations import Operation, OperationQuery, OperationStatus
from deployments.push_store import PushStore
from deployments.sources import AdapterSources
from deployments.state_store import StateStore
from deployments.two_phase import TwoPhase

logger = logging.getLogger(__name__)

# A member whose lease is shorter than the settings' hears from us after this much of it.
_POLLED_SHARE = 1 / 3

# First segments of names that would be taken for routes below /v1/adapters.
_ROUTES = frozenset({"aliases", "operations"})


class Controller:
    """Adapter names, their versions, and the operations that change them.

    To be built inside a running event loop: operations that a former controller left in doubt
    start at once.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        store: StateStore,
        sources: AdapterSources,
        *,
        pushes: PushStore,
        liveness: Liveness,
        clock: Clock,
        metrics: ControllerMetrics | None = None,
    ) -> None:
        stored = store.load()
        self._clock = clock
        self._store = store
        self._settings = settings
        self._agreement = TwoPhase(
            store, stored, liveness=liveness, clock=clock, lease_s=settings.lease_s
        )
        self._desired = self._agreement.desired
        self._metrics = metrics or ControllerMetrics()
        self._agreement.observe_broadcast = self._metrics.broadcast_seconds.observe
        self._operations = AdapterOperations(
            settings, sources, pushes, store, self._agreement, clock
        )
        self._aliases = AliasOperations(
            settings, store, self._agreement, self._operations.runner, self._operations.names
        )
        self._operations.recover(stored.open_operations)

    @property
    def settings(self) -> ControllerSettings:
        """The settings in force."""
        return self._settings

    def configure(self, settings: ControllerSettings, sources: AdapterSources) -> None:
        """Take over the settings of a newer deployment. Members keep the length of their leases."""
        self._agreement.members.lease_s = settings.lease_s
        self._settings = self._operations.settings = self._aliases.settings = settings
        self._operations.sources = sources

    # -- replicas

    async def register(self, request: Register) -> RegisterAnswer:
        """Make a replica a member and tell it everything."""
        member = await self._agreement.register(request)
        return RegisterAnswer(
            update=self._desired.snapshot(),
            warm_names=self._warm_names(),
            lease_s=member.lease_s,
        )

    async def watch(self, request: Watch) -> WatchAnswer:
        """Renew a replica's lease and answer when there is news, or after a while."""
        received = self._store.mark()
        member = self._agreement.renew(request)
        is_wrong = self._is_wrong(request)
        if not is_wrong:
            poll_s = min(self._settings.poll_s, member.lease_s * _POLLED_SHARE)
            await self._agreement.wait_for_news(request, member, poll_s)
        # The lease counts from here on at the latest, so whoever takes over waits for it.
        await self._store.confirm(received)
        update = self._desired.update_since(request.journal_id, request.table_version)
        return WatchAnswer(
            update=self._desired.snapshot() if is_wrong else update,
            preparing=self._agreement.preparing(member),
            lease_s=member.lease_s,
        )

    def _is_wrong(self, request: Watch) -> bool:
        """Whether a replica's table says something else than ours at the same version."""
        is_current = (request.journal_id, request.table_version) == (
            self._desired.journal_id,
            self._desired.table_version,
        )
        if request.fingerprint is None or not is_current:
            return False
        if request.fingerprint == self._desired.fingerprint():
            return False
        logger.error("the table of replica %s is wrong", request.member.replica_id)
        return True

    async def report(self, member: MemberId, op_id: str, report: PrepareReport) -> None:
        """Take in how a replica's prepare ended."""
        self._agreement.report(member, op_id, report)

    async def leave(self, member: MemberId) -> None:
        """End a replica's membership."""
        self._agreement.leave(member)

    async def resolve(self, name: str, member: MemberId) -> Resolved:
        """Find an unknown name's version, registering it if a resolver knows it.

        ``member`` is the replica that needs it: it alone checks the adapter before the name is
        registered, the others do when they need it.
        """
        validate_adapter_name(name)
        if name not in self._desired.adapters and name not in self._desired.aliases:
            if self._is_taken(name) or name in self._desired.unloaded:
                raise AdapterNotFoundError(name)
            with self._metrics.operation("resolve"):
                await self._operations.resolve(name, member)
        version = None if name in self._desired.aliases else self._find(name)
        return Resolved(version=version, table_version=self._desired.table_version)

    # -- operators

    async def load(self, load: LoadAdapter, op_id: str) -> AdapterVersion:
        """Put an adapter in service under a name; returns once every live replica knows."""
        self._check_may_update()
        self._check_name(load.name)
        with self._metrics.operation("load"):
            return await self._operations.load(load, op_id)

    async def unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        """Take a name out of service; returns once no live replica serves it to new requests."""
        self._check_may_update()
        with self._metrics.operation("unload"):
            return await self._operations.unload(unload, op_id)

    async def pin(self, pin: PinAdapter, op_id: str) -> AdapterVersion:
        """Pin or unpin an adapter; returns once every live replica did."""
        self._check_may_update()
        with self._metrics.operation("pin"):
            return await self._operations.pin(pin, op_id)

    async def roll_back(self, rollback: RollBackAdapter, op_id: str) -> AdapterVersion:
        """Put an earlier version in service; returns once every live replica knows."""
        self._check_may_update()
        with self._metrics.operation("rollback"):
            return await self._operations.roll_back(rollback, op_id)

    async def set_alias(self, asked: SetAlias, op_id: str) -> AdapterAlias:
        """Set or move an alias; returns once every live replica follows it."""
        self._check_may_update()
        self._check_name(asked.name)
        with self._metrics.operation("set_alias"):
            return await self._aliases.set(asked, op_id)

    async def delete_alias(self, asked: DeleteAlias, op_id: str) -> AdapterAlias:
        """Forget an alias; returns once no live replica follows it."""
        self._check_may_update()
        with self._metrics.operation("delete_alias"):
            return await self._aliases.delete(asked, op_id)

    async def list_aliases(self) -> list[AdapterAlias]:
        """List every alias by name."""
        return [alias for _, alias in sorted(self._desired.aliases.items())]

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        """List registered adapters, and those about to be, by name."""
        versions = dict(self._desired.adapters)
        for name, (_, operation) in self._operations.in_progress.items():
            versions.setdefault(name, self._announced(operation))
        statuses = (self._status(version) for _, version in sorted(versions.items()))
        return list(islice(filter(query.selects, statuses), query.limit))

    async def get_adapter(self, name: str) -> AdapterStatus:
        """Describe one registered adapter."""
        return self._status(self._find(name))

    async def list_replicas(self) -> list[ReplicaStatus]:
        """List the replicas that hold a lease."""
        self._agreement.reap_expired()
        now = self._clock.now()
        return [
            ReplicaStatus(
                replica_id=member.id.replica_id,
                node=member.node,
                table_version=member.table_version,
                lease_left_s=member.expires_at - now,
                num_running=member.num_running,
                num_waiting=member.num_waiting,
            )
            for member in self._agreement.members
        ]

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        """List operations, those under way among them, latest first."""
        waiting = self._operations.runner.list_waiting(query)
        repeated = {operation.op_id for operation in waiting}
        stored = [o for o in self._store.list_operations(query) if o.op_id not in repeated]
        found = (waiting + stored)[: query.limit]
        return [self._operation_status(operation) for operation in found]

    async def get_operation(self, op_id: str) -> OperationStatus:
        """Describe one operation."""
        operation = self._operations.runner.find(op_id)
        if operation is None:
            raise OperationNotFoundError(op_id)
        return self._operation_status(operation)

    async def collect_metrics(self) -> ClusterMetrics:
        """What this controller counts, and what the replicas last said."""
        resident = {digest for member in self._agreement.members for digest in member.residency}
        shown = (v for _, v in sorted(self._desired.adapters.items()) if v.digest in resident)
        view = FleetView(
            table_version=self._desired.table_version,
            num_adapters=len(self._desired.adapters),
            num_aliases=len(self._desired.aliases),
            num_operations=len(self._operations.in_progress),
            replicas=await self.list_replicas(),
            adapters=[self._status(version) for version in islice(shown, MAX_ADAPTERS)],
        )
        return ClusterMetrics(
            controller=self._metrics.snapshot(view),
            replicas=tuple(member.metrics for member in self._agreement.members),
        )

    # -- details

    def _operation_status(self, operation: Operation) -> OperationStatus:
        return OperationStatus(operation=operation, replicas=self._agreement.progress(operation))

    def _check_may_update(self) -> None:
        if not self._settings.allow_runtime_updating:
            raise RuntimeUpdatingDisabledError

    def _check_name(self, name: str) -> None:
        validate_adapter_name(name)
        if name == self._settings.base_model:
            raise NameConflictError(name)
        if self._is_taken(name):
            raise NameConflictError(name, "is kept for the routes of the same name.")

    def _is_taken(self, name: str) -> bool:
        return name == self._settings.base_model or name.split("/")[0] in _ROUTES

    def _find(self, name: str) -> AdapterVersion:
        version = self._desired.adapters.get(name)
        if version is None:
            raise AdapterNotFoundError(name)
        return version

    def _announced(self, operation: Operation) -> AdapterVersion:
        return operation.version or AdapterVersion(
            name=operation.name,
            generation=operation.generation,
            digest=operation.digest,
            source_uri=operation.source_uri,
            base_model=self._settings.base_model,
            rank=0,
            size_bytes=0,
            pinned=operation.pinned,
            created_by=operation.requested_by,
        )

    def _status(self, version: AdapterVersion) -> AdapterStatus:
        state, _ = self._operations.in_progress.get(version.name, (AdapterState.READY, None))
        return AdapterStatus(
            version=version,
            state=state,
            replicas=tuple(self._residency(version)),
            kept=self._desired.kept.get(version.name, ()),
        )

    def _residency(self, version: AdapterVersion) -> Iterator[ReplicaResidency]:
        for member in self._agreement.members:
            held = member.residency.get(version.digest)
            yield ReplicaResidency(
                replica_id=member.id.replica_id,
                generation=version.generation,
                host=held is not None and held.host,
                slot=None if held is None else held.slot,
                num_running=0 if held is None else held.num_running,
            )

    def _warm_names(self) -> tuple[str, ...]:
        """Names whose weights most other replicas hold: a new replica will be asked for them."""
        holders: dict[str, int] = {}
        for member in self._agreement.members:
            for held in member.residency.values():
                holders[held.digest] = holders.get(held.digest, 0) + (1 if held.host else 0)
        held_names = [
            n for n, version in self._desired.adapters.items() if version.digest in holders
        ]
        held_names.sort(key=lambda name: -holders[self._desired.adapters[name].digest])
        return tuple(held_names[: self._settings.max_warm])
