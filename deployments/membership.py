"""Which replicas must agree: who holds a lease, and what each acknowledged.

Pure bookkeeping over given times. Knows nothing of adapters, the journal or Ray.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from deployments.cluster_protocol import LeaseLostError, MemberId, Register, Residency, Watch


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One replica as last heard of. ``table_version`` is what it acknowledged."""

    id: MemberId
    node: str
    actor_name: str | None
    lease_s: float
    expires_at: float
    table_version: int = -1
    residency: dict[str, Residency] = field(default_factory=dict)
    num_running: int = 0
    num_waiting: int = 0
    metrics: bytes = b""


class Membership:
    """Members by id. A lease counts from the moment its renewal was received.

    The replica counts the same duration from the moment it sent the renewal, so it stops first.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._members: dict[MemberId, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, member_id: MemberId) -> Member | None:
        """Return a member, None if it is not one."""
        return self._members.get(member_id)

    def add(self, request: Register, now: float) -> Member:
        """Make a replica a member. It has acknowledged nothing so far.

        Its leases keep their length, whatever later settings say: what was granted still runs.
        """
        lease_s = request.lease_s or self.lease_s
        member = Member(
            id=request.member,
            node=request.node,
            actor_name=request.actor_name,
            lease_s=lease_s,
            expires_at=now + lease_s,
        )
        self._members[member.id] = member
        return member

    def renew(self, watch: Watch, now: float, *, is_current_journal: bool) -> Member:
        """Extend a lease and take in what the replica says, or raise LeaseLostError."""
        member = self._members.get(watch.member)
        if member is None or member.expires_at <= now:
            raise LeaseLostError(f"{watch.member.replica_id} holds no lease")
        member.expires_at = now + member.lease_s
        if is_current_journal:
            # A late, repeated message must not take back what was acknowledged.
            member.table_version = max(member.table_version, watch.table_version)
        member.residency = {held.digest: held for held in watch.residency}
        member.num_running = watch.num_running
        member.num_waiting = watch.num_waiting
        member.metrics = watch.metrics
        return member

    def remove(self, member_id: MemberId) -> bool:
        """Forget a member; returns whether it was one."""
        return self._members.pop(member_id, None) is not None

    def pop_expired(self, now: float) -> list[Member]:
        """Forget and return the members whose lease ran out."""
        expired = [member for member in self._members.values() if member.expires_at <= now]
        for member in expired:
            del self._members[member.id]
        return expired

    def next_expiry(self) -> float | None:
        """When the next lease runs out if nobody renews."""
        return min((member.expires_at for member in self._members.values()), default=None)

    def behind(self, table_version: int) -> list[Member]:
        """Members that have not acknowledged this table version."""
        return [member for member in self if member.table_version < table_version]
