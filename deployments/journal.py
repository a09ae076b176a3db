"""The journal's content: what every name means, and how far each operation got.

Knows SQL and the rules of an operation's life. Knows nothing of where the database is kept, when a
change is durable, or who may write.
"""

import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.cluster_protocol import MemberId, Register
from deployments.errors import JournalUnavailableError
from deployments.journal_tables import (
    create_tables,
    operation_row,
    read_operation,
    read_version,
    read_versions,
    version_text,
    versions_text,
)
from deployments.operations import Operation, OperationKind, OperationPhase, OperationQuery

# Ended operations are kept this far back, for audits and for recognising repeated calls.
MAX_ENDED_OPERATIONS = 10_000
# A replica that was away for longer than so many forced unloads lets its requests finish.
MAX_FORCED = 1000
PRUNE_EVERY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """All that a starting controller needs to know.

    ``unloaded`` names were unloaded by an operator: no resolver may bring them back by itself.
    ``forced`` are the last unloads that abort what runs, oldest first.
    """

    journal_id: str
    table_version: int
    adapters: dict[str, AdapterVersion] = field(default_factory=dict)
    kept: dict[str, tuple[AdapterVersion, ...]] = field(default_factory=dict)
    aliases: dict[str, AdapterAlias] = field(default_factory=dict)
    unloaded: frozenset[str] = frozenset()
    open_operations: tuple[Operation, ...] = ()
    forced: tuple[Operation, ...] = ()
    members: tuple[Register, ...] = ()


class Journal:
    """The tables of one journal. Each method is one transaction: it happens as a whole or raises.

    A change that cannot be written raises JournalUnavailableError.
    """

    def __init__(
        self, db: sqlite3.Connection, *, max_ended_operations: int = MAX_ENDED_OPERATIONS
    ) -> None:
        self._db = db
        self._max_ended_operations = max_ended_operations
        db.row_factory = sqlite3.Row
        create_tables(db)
        with self._transaction():
            for key, value in (
                ("journal_id", uuid.uuid4().hex),
                ("generation", "0"),
                ("table_version", "0"),
            ):
                db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))

    def load(self) -> StoredState:
        """Read everything, at start."""
        rows = self._db.execute("SELECT name, version, kept FROM adapters").fetchall()
        versions = {row["name"]: read_version(row["version"]) for row in rows}
        return StoredState(
            journal_id=self._meta("journal_id"),
            table_version=int(self._meta("table_version")),
            adapters={name: version for name, version in versions.items() if version},
            kept={row["name"]: kept for row in rows if (kept := read_versions(row["kept"]))},
            aliases={alias.name: alias for alias in self._aliases()},
            unloaded=frozenset(name for name, version in versions.items() if version is None),
            open_operations=tuple(self._open_operations()),
            forced=tuple(self._forced()),
            members=tuple(self._members()),
        )

    def begin(self, operation: Operation) -> Operation:
        """Write a new operation in phase PREPARING and allocate its generation."""
        with self._transaction():
            operation = replace(
                operation,
                phase=OperationPhase.PREPARING,
                generation=self._increment("generation"),
                ended_at=None,
                table_version=None,
                version=None,
                detail="",
            )
            self._write(operation)
            if operation.generation % PRUNE_EVERY == 0:
                self._prune()
        return operation

    def commit(
        self,
        op_id: str,
        version: AdapterVersion,
        *,
        forget: bool,
        now: float,
        kept: Sequence[AdapterVersion] = (),
    ) -> Operation:
        """Change what the name means and the operation's phase to COMMITTING, in one step."""
        with self._transaction():
            operation = self._committed(op_id, now, version)
            assert operation.table_version is not None
            in_service = None if forget else version
            self._put_adapter(operation.name, in_service, kept, operation.table_version)
        return operation

    def commit_alias(self, op_id: str, alias: AdapterAlias | None, *, now: float) -> Operation:
        """Change what an alias stands for and the operation's phase, in one step."""
        with self._transaction():
            operation = self._committed(op_id, now, None)
            self._db.execute("DELETE FROM aliases WHERE name = ?", (operation.name,))
            if alias is not None:
                self._put_alias(alias)
        return operation

    def _put_adapter(
        self,
        name: str,
        version: AdapterVersion | None,
        kept: Sequence[AdapterVersion],
        table_version: int,
    ) -> None:
        text = None if version is None else version_text(version)
        self._db.execute(
            "INSERT OR REPLACE INTO adapters (name, version, table_version, kept) "
            "VALUES (?, ?, ?, ?)",
            (name, text, table_version, versions_text(kept)),
        )

    def _put_alias(self, alias: AdapterAlias) -> None:
        self._db.execute("INSERT INTO aliases VALUES (?, ?)", (alias.name, alias.to_json()))

    def _committed(self, op_id: str, now: float, version: AdapterVersion | None) -> Operation:
        operation = replace(
            self._require(op_id, OperationPhase.PREPARING),
            phase=OperationPhase.COMMITTING,
            ended_at=now,
            table_version=self._increment("table_version"),
            version=version,
        )
        self._write(operation)
        return operation

    def finish(self, op_id: str, *, now: float) -> None:
        """Move a committed operation to DONE."""
        with self._transaction():
            operation = self._require(op_id, OperationPhase.COMMITTING)
            self._write(replace(operation, phase=OperationPhase.DONE, ended_at=now))

    def abort(
        self, op_id: str, detail: str, *, now: float, reasons: Mapping[str, str] | None = None
    ) -> None:
        """Move a preparing operation to ABORTED."""
        with self._transaction():
            operation = self._require(op_id, OperationPhase.PREPARING)
            self._write(
                replace(
                    operation,
                    phase=OperationPhase.ABORTED,
                    ended_at=now,
                    detail=detail,
                    reasons=dict(reasons or {}),
                )
            )

    def record(self, operation: Operation) -> None:
        """Remember an operation that ended before it began."""
        with self._transaction():
            row_id = self._write(operation)
            if row_id % PRUNE_EVERY == 0:
                self._prune()

    def list_operations(self, query: OperationQuery) -> list[Operation]:
        """Return remembered operations, latest first."""
        rows = self._db.execute(
            "SELECT * FROM operations WHERE :name IN ('', name) AND :phase IN ('', phase) "
            "ORDER BY started_at DESC, rowid DESC LIMIT :limit",
            asdict(query),
        )
        return list(map(read_operation, rows.fetchall()))

    def find_operation(self, op_id: str) -> Operation | None:
        """Return an operation that was begun, if it is still remembered."""
        row = self._db.execute("SELECT * FROM operations WHERE op_id = ?", (op_id,)).fetchone()
        return None if row is None else read_operation(row)

    def add_member(self, member: Register) -> None:
        """Remember a replica, so that a restarted controller waits for its lease."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?)",
                (
                    member.member.replica_id,
                    member.member.incarnation,
                    member.node,
                    member.actor_name,
                    member.lease_s,
                ),
            )

    def remove_member(self, member: MemberId) -> None:
        """Forget a replica."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM members WHERE replica_id = ? AND incarnation = ?",
                (member.replica_id, member.incarnation),
            )

    def last_generation(self) -> int:
        """The last generation that was allocated."""
        return int(self._meta("generation"))

    def restore(self, state: StoredState, *, generation: int) -> None:
        """Replace all names by others, as another journal: replicas take everything anew.

        Those that are members stay it: their leases may still run.
        """
        with self._transaction():
            for table in ("adapters", "aliases"):
                self._db.execute(f"DELETE FROM {table}")
            for key, value in (
                ("journal_id", uuid.uuid4().hex),
                ("generation", str(generation)),
                ("table_version", str(state.table_version)),
            ):
                self._db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
            for name in (*state.adapters, *state.unloaded):
                self._put_adapter(
                    name, state.adapters.get(name), state.kept.get(name, ()), state.table_version
                )
            for alias in state.aliases.values():
                self._put_alias(alias)

    def read_setting(self, key: str) -> str | None:
        """Return what was last written under this key."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (f"setting {key}",))
        found = row.fetchone()
        return None if found is None else str(found["value"])

    def write_setting(self, key: str, value: str) -> None:
        """Remember a value for whoever opens the journal next."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"setting {key}", value))

    def image(self) -> bytes:
        """The whole database as it is now."""
        return self._db.serialize()

    def return_to(self, image: bytes) -> None:
        """Take back everything that happened since this image was made."""
        self._db.deserialize(image)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise JournalUnavailableError(f"the journal cannot be written: {error}") from error
            raise

    def _meta(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row["value"])

    def _increment(self, key: str) -> int:
        value = int(self._meta(key)) + 1
        self._db.execute("UPDATE meta SET value = ? WHERE key = ?", (str(value), key))
        return value

    def _require(self, op_id: str, phase: OperationPhase) -> Operation:
        operation = self.find_operation(op_id)
        if operation is None or operation.phase is not phase:
            raise ValueError(f"operation {op_id} is not in phase {phase}: {operation}")
        return operation

    def _write(self, operation: Operation) -> int:
        values = operation_row(operation)
        columns = ", ".join(values)
        marks = ", ".join(f":{column}" for column in values)
        written = self._db.execute(
            f"INSERT OR REPLACE INTO operations ({columns}) VALUES ({marks})", values
        )
        return written.lastrowid or 0

    def _prune(self) -> None:
        ended = (OperationPhase.DONE, OperationPhase.ABORTED)
        self._db.execute(
            "DELETE FROM operations WHERE op_id IN (SELECT op_id FROM operations "
            "WHERE phase IN (?, ?) ORDER BY ended_at DESC LIMIT -1 OFFSET ?)",
            (*ended, self._max_ended_operations),
        )

    def _open_operations(self) -> Iterator[Operation]:
        rows = self._db.execute(
            "SELECT * FROM operations WHERE phase IN (?, ?) ORDER BY generation",
            (OperationPhase.PREPARING, OperationPhase.COMMITTING),
        ).fetchall()
        return map(read_operation, rows)

    def _forced(self) -> list[Operation]:
        rows = self._db.execute(
            "SELECT * FROM operations WHERE kind = ? AND table_version IS NOT NULL "
            "ORDER BY table_version DESC LIMIT ?",
            (OperationKind.UNLOAD, MAX_FORCED),
        ).fetchall()
        return [operation for operation in map(read_operation, rows) if operation.is_forced][::-1]

    def _aliases(self) -> Iterator[AdapterAlias]:
        for row in self._db.execute("SELECT document FROM aliases").fetchall():
            yield AdapterAlias.from_json(row["document"])

    def _members(self) -> Iterator[Register]:
        for row in self._db.execute("SELECT * FROM members").fetchall():
            yield Register(
                member=MemberId(row["replica_id"], row["incarnation"]),
                node=row["node"],
                actor_name=row["actor_name"],
                lease_s=row["lease_s"],
            )
