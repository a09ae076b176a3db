"""Makes every live replica agree on a change: prepare everywhere, journal, then flip everywhere.

Owns the membership and the running prepares. A change is in the journal before any replica hears
of it. Waiting ends for a replica when it acknowledged, when its lease ran out, or when it is
certain that its process is gone. Knows nothing of sources, resolvers or what users may do.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.clock import Clock, Signal
from deployments.cluster_protocol import (
    AliasChange,
    Liveness,
    MemberId,
    PrepareCommand,
    PrepareReport,
    Register,
    TableChange,
    Watch,
)
from deployments.desired_state import DesiredState
from deployments.errors import (
    AdapterCapacityError,
    AdapterRejectedError,
    JournalUnavailableError,
    OperationTimeoutError,
    ReplicaUnavailableError,
)
from deployments.journal import StoredState
from deployments.membership import Member, Membership
from deployments.operations import Operation, OperationPhase, ReplicaPhase, ReplicaProgress
from deployments.state_store import StateStore

logger = logging.getLogger(__name__)

# How often it is asked whether a replica that is waited for still lives.
_PROBE_S = 0.25
# Replicas refuse the same bytes at about the same time: wait this long for the others' reasons.
_REJECTION_GRACE_S = 2.0


@dataclass(slots=True, kw_only=True)
class _Prepare:
    command: PrepareCommand
    only: MemberId | None
    reports: dict[MemberId, PrepareReport] = field(default_factory=dict)

    def asks(self, member: Member) -> bool:
        return self.only is None or self.only == member.id

    @property
    def rejections(self) -> dict[MemberId, PrepareReport]:
        return {
            member: report
            for member, report in self.reports.items()
            if report.rejection is not None
        }


class TwoPhase:
    """Runs operations' phases against the members."""

    def __init__(
        self,
        store: StateStore,
        stored: StoredState,
        *,
        liveness: Liveness,
        clock: Clock,
        lease_s: float,
    ) -> None:
        self.desired = DesiredState(stored)
        self.members = Membership(lease_s)
        self._store = store
        self._liveness = liveness
        self._clock = clock
        self._signal = Signal(clock)
        self._prepares: dict[str, _Prepare] = {}
        self._joining: Counter[MemberId] = Counter()
        # Told how long the members took to follow a change.
        self.observe_broadcast: Callable[[float], object] = lambda _: None
        # A restarted controller cannot know when these renewed last: grant them a whole lease, as
        # long as theirs was.
        for member in stored.members:
            self.members.add(member, clock.now())

    # -- towards replicas

    async def register(self, request: Register) -> Member:
        """Make a replica a member, in the journal first."""
        request = replace(request, lease_s=self.members.lease_s)
        self._joining[request.member] += 1
        try:
            await self._store.add_member(request)
        finally:
            self._joining[request.member] -= 1
        member = self.members.add(request, self._clock.now())
        self._signal.notify()
        return member

    def leave(self, member_id: MemberId) -> None:
        """End a membership."""
        if self.members.remove(member_id):
            self._forget_member(member_id)
            self._signal.notify()

    def report(self, member_id: MemberId, op_id: str, report: PrepareReport) -> None:
        """Take in how a prepare ended; late reports are ignored."""
        prepare = self._prepares.get(op_id)
        if prepare is not None and self.members.get(member_id) is not None:
            prepare.reports[member_id] = report
            self._signal.notify()

    def renew(self, watch: Watch) -> Member:
        """Extend a lease and take in its acknowledgement, or raise LeaseLostError."""
        is_current = watch.journal_id == self.desired.journal_id
        member = self.members.renew(watch, self._clock.now(), is_current_journal=is_current)
        self._signal.notify()
        return member

    async def wait_for_news(self, watch: Watch, member: Member, timeout_s: float) -> None:
        """Return when the replica should hear from us, at the latest after the time-out."""
        await self._signal.wait_until(
            lambda: (
                watch.table_version != self.desired.table_version
                or watch.journal_id != self.desired.journal_id
                or watch.known_operations != {c.op_id for c in self.preparing(member)}
            ),
            deadline=self._clock.now() + timeout_s,
        )

    def preparing(self, member: Member) -> tuple[PrepareCommand, ...]:
        """The prepares that a member should know."""
        return tuple(p.command for p in self._prepares.values() if p.asks(member))

    def progress(self, operation: Operation) -> tuple[ReplicaProgress, ...]:
        """How far each replica is with an operation, or why it rejected one that ended."""
        prepare = self._prepares.get(_attempt(operation))
        if prepare is not None:
            return tuple(
                _progress(member, prepare) for member in self.members if prepare.asks(member)
            )
        if operation.phase is OperationPhase.COMMITTING:
            behind = self.members.behind(operation.table_version or 0)
            return tuple(
                ReplicaProgress(
                    replica_id=member.id.replica_id,
                    phase=ReplicaPhase.COMMITTING if member in behind else ReplicaPhase.COMMITTED,
                )
                for member in self.members
            )
        return tuple(
            ReplicaProgress(replica_id=replica_id, phase=ReplicaPhase.REJECTED, reason=reason)
            for replica_id, reason in operation.reasons.items()
        )

    # -- phases of an operation

    async def prepare(
        self, operation: Operation, *, only: MemberId | None, timeout_s: float
    ) -> PrepareReport:
        """Have all members (or one) prepare; returns what they found, or raises if any refuses.

        The prepare stays announced until ``commit`` or ``abort``.
        """
        command = PrepareCommand(
            op_id=_attempt(operation),
            name=operation.name,
            digest=operation.digest,
            source_uri=operation.source_uri,
            pinned=operation.pinned,
        )
        prepare = self._prepares[command.op_id] = _Prepare(command=command, only=only)
        self._signal.notify()
        if not len(self.members):
            # All may be about to register again; without any for this long, there are none.
            timeout_s = min(timeout_s, self.members.lease_s)
        await self._wait_for(
            lambda: self._silent(prepare), timeout_s, until=lambda: self._is_decided(prepare)
        )
        if prepare.rejections:
            await self._wait_for(lambda: self._silent(prepare), _REJECTION_GRACE_S)
            raise _rejected(operation.name, prepare.rejections)
        if silent := self._silent(prepare):
            names = ", ".join(member.id.replica_id for member in silent)
            raise OperationTimeoutError(
                operation.name, timeout_s, f"no answer from {names}", op_id=operation.op_id
            )
        accepted = self._accepted(prepare)
        if not accepted:
            raise ReplicaUnavailableError("no live replica could check the adapter, try again")
        return accepted[0]

    async def commit(
        self,
        operation: Operation,
        version: AdapterVersion,
        *,
        forget: bool = False,
        keep: int = 0,
    ) -> Operation:
        """Write the change to the journal, then announce it. Takes effect or raises as a whole."""
        kept = () if forget else self.desired.kept_beside(version, keep)
        committed = await self._store.commit(
            operation.op_id, version, forget=forget, kept=kept, now=self._clock.wall()
        )
        assert committed.table_version is not None
        change = TableChange(name=operation.name, version=None if forget else version, kept=kept)
        self.desired.apply(change, committed.table_version)
        if committed.is_forced:
            self.desired.force(committed)
        self._prepares.pop(_attempt(operation), None)
        self._signal.notify()
        return committed

    async def commit_alias(self, operation: Operation, alias: AdapterAlias | None) -> Operation:
        """Write what an alias stands for to the journal, then announce it; None forgets it."""
        committed = await self._store.commit_alias(operation.op_id, alias, now=self._clock.wall())
        assert committed.table_version is not None
        change = AliasChange(name=operation.name, alias=alias)
        self.desired.apply_alias(change, committed.table_version)
        self._signal.notify()
        return committed

    def end_prepares(self, operations: Sequence[Operation]) -> None:
        """Stop announcing prepares that are not a commit's own."""
        for operation in operations:
            self._prepares.pop(_attempt(operation), None)
        self._signal.notify()

    def abort(
        self, operation: Operation, detail: str, reasons: Mapping[str, str] | None = None
    ) -> None:
        """Take back an operation that was not committed."""
        self._prepares.pop(_attempt(operation), None)
        self._signal.notify()
        try:
            self._store.abort(operation.op_id, detail, now=self._clock.wall(), reasons=reasons)
        except JournalUnavailableError:
            # Harmless: an operation found in this phase is aborted at the next start.
            logger.warning("cannot record that operation %s was aborted", operation.op_id)

    async def settle(self, operation: Operation) -> None:
        """Wait until every member acknowledged a committed change or is out."""
        table_version = operation.table_version
        assert table_version is not None
        began = self._clock.now()
        await self._wait_for(lambda: self.members.behind(table_version), math.inf)
        self.observe_broadcast(self._clock.now() - began)
        self.finish(operation)

    async def settle_table(self) -> None:
        """Wait until every member acknowledged the table as it is now."""
        table_version = self.desired.table_version
        await self._wait_for(lambda: self.members.behind(table_version), math.inf)

    def finish(self, operation: Operation) -> None:
        """Close a committed operation."""
        if operation.phase is not OperationPhase.COMMITTING:
            return
        try:
            self._store.finish(operation.op_id, now=self._clock.wall())
        except JournalUnavailableError:
            # Harmless: the change itself is in the journal, the next start finishes it.
            logger.warning("cannot record that operation %s is done", operation.op_id)

    # -- waiting

    def _silent(self, prepare: _Prepare) -> list[Member]:
        return [m for m in self.members if prepare.asks(m) and m.id not in prepare.reports]

    def _accepted(self, prepare: _Prepare) -> list[PrepareReport]:
        """What live members said that accept; what a dead one said is worth nothing."""
        reports = [prepare.reports[m.id] for m in self.members if m.id in prepare.reports]
        return [report for report in reports if report.rejection is None]

    def _is_decided(self, prepare: _Prepare) -> bool:
        if prepare.rejections:
            return True
        # Whoever reported may have left meanwhile: then the next to join is waited for, unless one
        # certain replica was asked.
        has_verdict = prepare.only is not None or bool(self._accepted(prepare))
        return has_verdict and not self._silent(prepare)

    async def _wait_for(
        self,
        missing: Callable[[], list[Member]],
        timeout_s: float,
        *,
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Wait until nobody is missing (or as ``until`` says), while the dead are dropped."""
        is_done = until or (lambda: not missing())
        deadline = self._clock.now() + timeout_s
        while True:
            self.reap_expired()
            now = self._clock.now()
            if is_done() or now >= deadline:
                return
            expiry = self.members.next_expiry()
            wake = min(deadline, now + _PROBE_S, math.inf if expiry is None else expiry)
            if not await self._signal.wait_until(is_done, deadline=wake):
                await self._reap_dead(missing())

    def reap_expired(self) -> None:
        """Drop the members whose lease ran out."""
        for member in self.members.pop_expired(self._clock.now()):
            logger.warning("replica %s lost its lease", member.id.replica_id)
            self._forget_member(member.id)

    async def _reap_dead(self, candidates: list[Member]) -> None:
        by_name = {m.actor_name: m for m in candidates if m.actor_name is not None}
        if not by_name:
            return
        nodes = {actor_name: member.node for actor_name, member in by_name.items()}
        for actor_name in await self._liveness.find_dead(nodes):
            logger.warning("replica %s died", actor_name)
            self.leave(by_name[actor_name].id)

    def _forget_member(self, member_id: MemberId) -> None:
        if self._joining[member_id]:
            return  # Its former lease ended while it is being written down anew.
        try:
            self._store.remove_member(member_id)
        except JournalUnavailableError:
            # Harmless: a restarted controller would wait one lease for it.
            logger.warning("cannot record that replica %s is gone", member_id.replica_id)


def _progress(member: Member, prepare: _Prepare) -> ReplicaProgress:
    report = prepare.reports.get(member.id)
    phase = ReplicaPhase.PREPARING
    if report is not None:
        phase = ReplicaPhase.PREPARED if report.rejection is None else ReplicaPhase.REJECTED
    reason = (report and report.rejection) or ""
    return ReplicaProgress(replica_id=member.id.replica_id, phase=phase, reason=reason)


def _attempt(operation: Operation) -> str:
    """What replicas call a prepare.

    An operation that is repeated after the controller restarted is another attempt: a replica may
    still know the last one, and what it reported went to the controller that is gone.
    """
    return f"{operation.op_id}@{operation.generation}"


def _rejected(
    name: str, rejections: dict[MemberId, PrepareReport]
) -> AdapterRejectedError | AdapterCapacityError | ReplicaUnavailableError:
    reasons = {member.replica_id: report.rejection or "" for member, report in rejections.items()}
    error = AdapterRejectedError(name, reasons)
    if all(report.no_room for report in rejections.values()):
        return AdapterCapacityError(name, reasons)
    if all(report.retryable or report.no_room for report in rejections.values()):
        unavailable = ReplicaUnavailableError(error.message)
        unavailable.reasons = error.reasons
        return unavailable
    return error
