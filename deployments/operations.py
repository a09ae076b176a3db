"""Operations on adapters as the journal knows them.

    PREPARING ──▶ COMMITTING ──▶ DONE
        └───────▶ ABORTED

Until COMMITTING is in the journal nothing has changed anywhere; from then on it will change
everywhere.
"""

from dataclasses import dataclass
from enum import StrEnum

from adapters import AdapterVersion


class OperationKind(StrEnum):
    """What an operation does to a name. RESOLVE is a load that a request caused."""

    LOAD = "load"
    UNLOAD = "unload"
    RESOLVE = "resolve"


class OperationPhase(StrEnum):
    """How far an operation got."""

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

    ``op_id`` is chosen by the caller, so that a repeated call is recognised. ``generation`` is
    allocated when the operation is first written and is never used again, even if it aborts.
    ``version`` is what the operation put in service (load) or took out of it (unload).
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
