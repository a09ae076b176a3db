"""Where the journal is kept: what a store promises, and the one on a local disk.

Everything that matters is durable before anyone is told. Knows files and locks; what is in the
journal is ``journal.py``'s. ``s3_state_store.py`` keeps it in an object instead.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.cluster_protocol import MemberId, Register
from deployments.errors import JournalUnavailableError
from deployments.journal import Journal, StoredState
from deployments.operations import Operation, OperationQuery

# Another process may still be dying with the file open when the next controller starts.
_LOCK_TIMEOUT_S = 10.0

T = TypeVar("T")


class StateStore(ABC):
    """A durable journal that one controller holds.

    What is awaited has survived a crash once it returns. If it raises JournalUnavailableError it
    has not happened; while that is unknown it does not return. Changes that are not awaited become
    durable soon, in order: should they be lost, the next controller finds out by itself.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    @abstractmethod
    async def write(self, change: Callable[[], T]) -> T:
        """Do something to the journal and make it durable, or undo it and raise."""

    @abstractmethod
    def _note(self, change: Callable[[], None]) -> None:
        """Do something to the journal that becomes durable soon."""

    @abstractmethod
    def mark(self) -> int:
        """A point in time for ``confirm``."""

    @abstractmethod
    async def confirm(self, since: int) -> None:
        """Return only if no other controller had taken the journal over at some time since then.

        A lease may be granted only then: whoever takes over waits for leases granted before.
        """

    @abstractmethod
    def check_held(self) -> None:
        """Raise JournalLostError if it is known that another controller took over."""

    @abstractmethod
    async def close(self) -> None:
        """Release the journal for another controller."""

    def load(self) -> StoredState:
        """Read everything, at start."""
        return self.journal.load()

    async def begin(self, operation: Operation) -> Operation:
        """Write a new operation in phase PREPARING and allocate its generation."""
        return await self.write(lambda: self.journal.begin(operation))

    async def commit(
        self,
        op_id: str,
        version: AdapterVersion,
        *,
        forget: bool,
        now: float,
        kept: Sequence[AdapterVersion] = (),
    ) -> Operation:
        """Change what the name means and the operation's phase to COMMITTING, in one step.

        ``version`` is what comes into service, or what leaves it when ``forget``; ``kept`` are
        the earlier versions that stay known. Commits return in the order of their table versions.
        """
        return await self.write(
            lambda: self.journal.commit(op_id, version, forget=forget, now=now, kept=kept)
        )

    async def commit_alias(
        self, op_id: str, alias: AdapterAlias | None, *, now: float
    ) -> Operation:
        """The same for an alias; None forgets it."""
        return await self.write(lambda: self.journal.commit_alias(op_id, alias, now=now))

    def finish(self, op_id: str, *, now: float) -> None:
        """Move a committed operation to DONE."""
        self._note(lambda: self.journal.finish(op_id, now=now))

    def abort(
        self, op_id: str, detail: str, *, now: float, reasons: Mapping[str, str] | None = None
    ) -> None:
        """Move a preparing operation to ABORTED."""
        self._note(lambda: self.journal.abort(op_id, detail, now=now, reasons=reasons))

    def record(self, operation: Operation) -> None:
        """Remember an operation that ended before it began. It uses up no generation."""
        self._note(lambda: self.journal.record(operation))

    async def add_member(self, member: Register) -> None:
        """Remember a replica, so that a restarted controller waits for its lease."""
        await self.write(lambda: self.journal.add_member(member))

    def remove_member(self, member: MemberId) -> None:
        """Forget a replica."""
        self._note(lambda: self.journal.remove_member(member))

    async def write_setting(self, key: str, value: str) -> None:
        """Remember a value for the next controller."""
        await self.write(lambda: self.journal.write_setting(key, value))

    def list_operations(self, query: OperationQuery) -> list[Operation]:
        """Return remembered operations, latest first."""
        return self.journal.list_operations(query)

    def find_operation(self, op_id: str) -> Operation | None:
        """Return an operation that was begun, if it is still remembered."""
        return self.journal.find_operation(op_id)


class SqliteStateStore(StateStore):
    """The journal in one SQLite file, held exclusively: two controllers cannot both write."""

    def __init__(self, path: Path) -> None:
        super().__init__(_open(path))

    async def write(self, change: Callable[[], T]) -> T:
        """Do something to the journal; SQLite has synced it when it returns."""
        return change()

    def _note(self, change: Callable[[], None]) -> None:
        change()

    def mark(self) -> int:
        """Nothing needs a look, since nobody else can open the file."""
        return 0

    async def confirm(self, since: int) -> None:
        """Nothing to look at."""

    def check_held(self) -> None:
        """Held as long as this process lives."""

    async def close(self) -> None:
        """Release the journal for another controller."""
        self.journal.close()


def _open(path: Path) -> Journal:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(
            path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        return Journal(db)
    except (OSError, sqlite3.Error) as error:
        raise JournalUnavailableError(
            f"cannot open the journal {path} (only one controller may hold it): {error}"
        ) from error
