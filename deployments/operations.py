"""Operations on adapters as the journal knows them.

    WAITING ──▶ PREPARING ──▶ COMMITTING ──▶ DONE
        └───────────┴───────▶ ABORTED

Until COMMITTING is in the journal nothing has changed anywhere; from then on it will change
everywhere.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from adapters import AdapterVersion


class OperationKind(StrEnum):
    """What an operation does to a name. RESOLVE is a load that a request caused."""

    LOAD = "load"
    UNLOAD = "unload"
    RESOLVE = "resolve"
    PIN = "pin"
    ROLLBACK = "rollback"
    SET_ALIAS = "set_alias"
    DELETE_ALIAS = "delete_alias"


class OperationPhase(StrEnum):
    """How far an operation got. WAITING (for its turn, or its source) is not in the journal."""

    WAITING = "waiting"
    PREPARING = "preparing"
    COMMITTING = "committing"
    DONE = "done"
    ABORTED = "aborted"

    @property
    def is_committed(self) -> bool:
        return self in (OperationPhase.COMMITTING, OperationPhase.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation, with who asked for it and from where.

    ``op_id`` is chosen by the caller, so that a repeated call is recognised; ``request`` is what
    the caller asked for, so that another call under the same id is not taken for a repeated one.
    ``generation`` is allocated when the operation is first written and is never used again, even
    if it aborts. ``version`` is what the operation put in service (load) or took out of it
    (unload). ``detail`` and ``reasons`` (by replica) say why it was aborted.
    """

    op_id: str
    kind: OperationKind
    name: str
    phase: OperationPhase = OperationPhase.PREPARING
    generation: int = 0
    digest: str = ""
    source_uri: str = ""
    pinned: bool = False
    requested_by: str = ""
    requested_from: str = ""
    started_at: float = 0.0
    ended_at: float | None = None
    table_version: int | None = None
    version: AdapterVersion | None = None
    detail: str = ""
    request: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        """Whether it unloads and aborts what still runs."""
        return self.kind is OperationKind.UNLOAD and self.request == describe_request(True)

    def is_repeat_of(self, other: "Operation") -> bool:
        """Whether both are the same call. (Old journals do not know what was asked for.)"""
        same_target = (self.kind, self.name) == (other.kind, other.name)
        return same_target and other.request in ("", self.request)


class ReplicaPhase(StrEnum):
    """How far one replica got with an operation."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    REJECTED = "rejected"
    COMMITTING = "committing"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProgress:
    """One replica's part in an operation; ``reason`` is why it rejected."""

    replica_id: str
    phase: ReplicaPhase
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStatus:
    """An operation and what the replicas have done about it so far."""

    operation: Operation
    replicas: tuple[ReplicaProgress, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationQuery:
    """Which operations to list, latest first. An empty field means any."""

    name: str = ""
    phase: str = ""
    limit: int = 50


_OPERATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", re.ASCII)


def is_operation_id(text: str) -> bool:
    """Whether a caller may choose this as an operation's id."""
    return _OPERATION_ID.fullmatch(text) is not None


def describe_request(*facts: object) -> str:
    """What a caller asked for, to compare repeated calls by."""
    return json.dumps(facts)
