"""What the controller and the replicas say to each other.

The conversation is level-triggered: a replica says what it has, the controller answers with what
there should be. A lost, repeated or late message therefore does no harm, and either side may
restart at any moment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.errors import ClusterError


class LeaseLostError(ClusterError):
    """The controller does not count this replica among its members: it must register again."""


@dataclass(frozen=True, slots=True)
class MemberId:
    """One life of one replica: a restarted replica is another member."""

    replica_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What a replica holds of one adapter, by its bytes."""

    digest: str
    host: bool
    slot: int | None
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """A name's new meaning; ``version`` None forgets it.

    ``kept`` are all earlier versions that may still be asked for by their generations.
    """

    name: str
    version: AdapterVersion | None
    kept: tuple[AdapterVersion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasChange:
    """What an alias stands for now; ``alias`` None forgets it."""

    name: str
    alias: AdapterAlias | None


@dataclass(frozen=True, slots=True)
class ForcedEnd:
    """What runs on a name's versions up to this generation is to be aborted."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUpdate:
    """Brings a replica's table to ``table_version``.

    A snapshot lists every name and replaces the table; otherwise only names that changed.
    """

    journal_id: str
    table_version: int
    changes: tuple[TableChange, ...]
    aliases: tuple[AliasChange, ...] = ()
    forced: tuple[ForcedEnd, ...] = ()
    snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareCommand:
    """Make an adapter's bytes ready to serve, and report whether that worked."""

    op_id: str
    name: str
    digest: str
    source_uri: str
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """How a prepare ended. ``rejection`` None means that the adapter is ready to serve.

    ``retryable`` says that the same bytes may be accepted later (source down), ``no_room`` that
    they will be once others made room.
    """

    rejection: str | None = None
    retryable: bool = False
    no_room: bool = False
    rank: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A replica asks to become a member. ``actor_name`` lets the controller see its death.

    ``lease_s`` is the controller's to say: how long each of this member's leases is.
    """

    member: MemberId
    node: str = ""
    actor_name: str | None = None
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    """The whole table, and names worth preparing before the replica takes requests."""

    update: TableUpdate
    warm_names: tuple[str, ...]
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A replica renews its lease, acknowledges what it applied, and waits for news.

    ``metrics`` is for whoever asks the controller about the whole cluster; ``fingerprint`` is the
    table's, now and then, so that one that went wrong is found.
    """

    member: MemberId
    journal_id: str
    table_version: int
    known_operations: frozenset[str] = frozenset()
    residency: tuple[Residency, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    metrics: bytes = b""
    fingerprint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchAnswer:
    """News, if any, and every prepare that this replica should know at this moment.

    A prepare that the replica knows and that is missing here has ended: the table says how.
    """

    update: TableUpdate | None
    preparing: tuple[PrepareCommand, ...]
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A name's version and the table version from which on every replica knows it.

    ``version`` None says that the name is an alias by now.
    """

    version: AdapterVersion | None
    table_version: int


class ReplicaPort(Protocol):
    """What a replica may ask of the controller."""

    async def register(self, request: Register) -> RegisterAnswer:
        """Become a member. The lease starts when the controller receives the request."""

    async def watch(self, request: Watch) -> WatchAnswer:
        """Return when there is news or after a while; raises LeaseLostError."""

    async def report(self, member: MemberId, op_id: str, report: PrepareReport) -> None:
        """Say how a prepare ended."""

    async def resolve(self, name: str, member: MemberId) -> Resolved:
        """Find an unknown name's version, registering it if a resolver knows it."""

    async def leave(self, member: MemberId) -> None:
        """End the membership at once."""


class Liveness(Protocol):
    """Tells which replicas are certainly dead, sooner than their leases do."""

    async def find_dead(self, actors: Mapping[str, str]) -> set[str]:
        """Return those actors, named with their nodes, whose process is certainly gone."""
