"""The journal's tables, and how records become rows.

Knows SQL types; knows nothing of transactions or when anything is written.
"""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from adapters import AdapterVersion
from deployments.operations import Operation, OperationKind, OperationPhase

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS adapters (
    name TEXT PRIMARY KEY, version TEXT, table_version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS aliases (name TEXT PRIMARY KEY, document TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS operations (
    op_id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, phase TEXT NOT NULL,
    generation INTEGER NOT NULL, digest TEXT NOT NULL, source_uri TEXT NOT NULL,
    pinned INTEGER NOT NULL, requested_by TEXT NOT NULL, requested_from TEXT NOT NULL,
    started_at REAL NOT NULL, ended_at REAL, table_version INTEGER, version TEXT,
    detail TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS operations_by_phase ON operations (phase, ended_at);
CREATE TABLE IF NOT EXISTS members (
    replica_id TEXT NOT NULL, incarnation TEXT NOT NULL, node TEXT NOT NULL, actor_name TEXT,
    PRIMARY KEY (replica_id, incarnation)) WITHOUT ROWID;
"""

# Columns that the first journals did not have.
_LATER_COLUMNS = (
    ("operations", "request", "TEXT NOT NULL DEFAULT ''"),
    ("operations", "reasons", "TEXT NOT NULL DEFAULT '{}'"),
    ("adapters", "kept", "TEXT NOT NULL DEFAULT '[]'"),
    ("members", "lease_s", "REAL NOT NULL DEFAULT 0"),
)


def create_tables(db: sqlite3.Connection) -> None:
    """Bring an empty or older journal to the present form."""
    db.executescript(_SCHEMA)
    for table, column, definition in _LATER_COLUMNS:
        present = {row["name"] for row in db.execute(f"PRAGMA table_info({table})")}
        if column not in present:
            db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {definition}")


def version_text(version: AdapterVersion) -> str:
    """A version as it is stored."""
    return json.dumps(asdict(version))


def read_version(text: str | None) -> AdapterVersion | None:
    """The inverse; None for a name that means nothing."""
    return None if text is None else AdapterVersion(**json.loads(text))


def versions_text(versions: Sequence[AdapterVersion]) -> str:
    """Several versions as they are stored."""
    return json.dumps([asdict(version) for version in versions])


def read_versions(text: str) -> tuple[AdapterVersion, ...]:
    """The inverse."""
    return tuple(AdapterVersion(**values) for values in json.loads(text))


def operation_row(operation: Operation) -> dict[str, Any]:
    """An operation's columns."""
    values: dict[str, Any] = asdict(operation)
    values["version"] = None if operation.version is None else version_text(operation.version)
    values["reasons"] = json.dumps(values["reasons"])
    return values


def read_operation(row: sqlite3.Row) -> Operation:
    """The inverse."""
    values = dict(row)
    values["kind"] = OperationKind(values["kind"])
    values["phase"] = OperationPhase(values["phase"])
    values["pinned"] = bool(values["pinned"])
    values["version"] = read_version(values["version"])
    values["reasons"] = json.loads(values["reasons"])
    return Operation(**values)
