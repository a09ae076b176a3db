"""Runs the work of operations: each to its end, whoever waits, and once for all who repeat it.

Keeps what is not in the journal yet: who waits for a turn or a source. Knows nothing of what an
operation does.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from deployments.clock import Clock
from deployments.errors import (
    ClusterError,
    JournalUnavailableError,
    OperationConflictError,
    OperationTimeoutError,
)
from deployments.operations import Operation, OperationKind, OperationPhase, OperationQuery
from deployments.state_store import StateStore

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Asked(Protocol):
    """What every call says about itself."""

    @property
    def name(self) -> str: ...
    @property
    def requested_by(self) -> str: ...
    @property
    def requested_from(self) -> str: ...


class OperationRunner:
    """Operations under way, by their ids."""

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self._store = store
        self._clock = clock
        self._called: dict[str, Operation] = {}

    def called(
        self, op_id: str, kind: OperationKind, asked: Asked, request: str, *, pinned: bool = False
    ) -> Operation:
        """The record of a call; raises if its id was given to another call."""
        called = Operation(
            op_id=op_id,
            kind=kind,
            name=asked.name,
            phase=OperationPhase.WAITING,
            pinned=pinned,
            requested_by=asked.requested_by,
            requested_from=asked.requested_from,
            started_at=self._clock.wall(),
            request=request,
        )
        past = self._called.get(op_id) or self._store.find_operation(op_id)
        is_over = past is not None and past.phase is OperationPhase.ABORTED
        if past is not None and not is_over and not called.is_repeat_of(past):
            raise OperationConflictError(op_id, f"the {past.kind} of {past.name!r}")
        return called

    async def run(
        self, called: Operation, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float
    ) -> T:
        """Wait for an operation's work, which goes on if the caller does not wait that long."""
        if called.op_id not in self.tasks:
            self._called[called.op_id] = called
            self.start(called.op_id, self._recorded(called, work))
        return await self._wait(self.tasks[called.op_id], called.name, limit_s, op_id=called.op_id)

    async def share(
        self, key: str, name: str, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float
    ) -> T:
        """Wait for work that is no operator's, once for all who ask under this key."""
        task = self.tasks.get(key) or self.start(key, work())
        return await self._wait(task, name, limit_s, op_id="")

    def start(self, key: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin work that nobody needs to wait for."""
        task = self.tasks[key] = asyncio.ensure_future(work)

        def forget(task: asyncio.Task[T]) -> None:
            del self.tasks[key]
            if not task.cancelled():
                task.exception()  # Seen, even if every caller went away.

        task.add_done_callback(forget)
        return task

    def record(self, called: Operation, **outcome: Any) -> None:
        """Remember an operation that ended without a change."""
        try:
            self._store.record(replace(called, ended_at=self._clock.wall(), **outcome))
        except JournalUnavailableError:
            # Harmless: nothing was changed, and the caller is told.
            logger.warning("cannot record how operation %s ended", called.op_id)

    # -- views

    def list_waiting(self, query: OperationQuery) -> list[Operation]:
        """Operations that wait for their turn or their source, latest first."""
        waiting = [
            operation
            for operation in self._called.values()
            if not self._is_journaled(operation)
            and query.name in ("", operation.name)
            and query.phase in ("", operation.phase)
        ]
        return waiting[::-1]

    def find(self, op_id: str) -> Operation | None:
        """An operation that is under way or remembered."""
        called = self._called.get(op_id)
        if called is not None and not self._is_journaled(called):
            return called
        return self._store.find_operation(op_id)

    # -- details

    async def _wait(self, task: asyncio.Task[T], name: str, limit_s: float, *, op_id: str) -> T:
        done, _ = await asyncio.wait((task,), timeout=limit_s)
        if not done:
            raise OperationTimeoutError(name, limit_s, "it goes on", op_id=op_id)
        return task.result()

    async def _recorded(self, called: Operation, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work; what refused it before it began is remembered too."""
        subject = {"operation_id": called.op_id, "operation": called.kind, "adapter": called.name}
        try:
            result = await work()
            generation = getattr(result, "generation", None)
            logger.info("operation done", extra={**subject, "generation": generation})
            return result
        except (ClusterError, ValueError) as error:
            logger.info("operation refused: %s", error, extra=subject)
            if not self._is_journaled(called):
                self._remember_refusal(called, error)
            raise
        finally:
            del self._called[called.op_id]

    def _is_journaled(self, called: Operation) -> bool:
        past = self._store.find_operation(called.op_id)
        return past is not None and past.started_at == called.started_at

    def _remember_refusal(self, called: Operation, error: Exception) -> None:
        past = self._store.find_operation(called.op_id)
        if past is None or past.phase is OperationPhase.ABORTED:
            self.record(called, phase=OperationPhase.ABORTED, detail=str(error))
