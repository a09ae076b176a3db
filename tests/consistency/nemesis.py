"""Breaks things one after the other, and says how long the cluster took to get over each.

Acts on processes and files only, as accidents do. Everything that it pauses, limits or locks is
released, also when it is stopped in the middle.
"""

import asyncio
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx

from tests.consistency.served import Role, Served

_RECOVERY_LIMIT_S = 90.0
_POLL_S = 0.1
_CUT_S = 3.0
_LOCK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What was done when, and the time from then until all replicas held leases and one table."""

    action: str
    at: float
    recovered_s: float


class RecoveryError(Exception):
    """The cluster did not get over it."""


class Nemesis:
    """Picks actions at random; ``lease_s`` is what pauses are longer than."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._chance = random.Random(seed)
        self._pause_s = served.config.cluster.lease_s * 1.5
        self.deeds: list[Deed] = []
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill replica": lambda: self._kill(Role.REPLICA),
            "kill controller": lambda: self._kill(Role.CONTROLLER),
            "kill ingress": lambda: self._kill(Role.INGRESS),
            "pause replica": lambda: self._pause(Role.REPLICA),
            "pause controller": lambda: self._pause(Role.CONTROLLER),
            "pause ingress": lambda: self._pause(Role.INGRESS),
            "cut store": self._cut_store,
            "lock store": self._lock_store,
            "kill replica and controller": self._kill_both,
        }

    async def run(self, is_over: asyncio.Event, *, gap_s: float) -> None:
        """Go through all actions in random order, again and again."""
        async with httpx.AsyncClient(base_url=self._served.url, timeout=10) as http:
            while not is_over.is_set():
                for action in self._chance.sample(list(self._actions), len(self._actions)):
                    if is_over.is_set():
                        return
                    await self._do(action, http)
                    await asyncio.sleep(self._chance.random() * 2 * gap_s)

    async def _do(self, action: str, http: httpx.AsyncClient) -> None:
        before = await self._members(http)
        at = time.monotonic()
        await self._actions[action]()
        kills_replica = action.startswith("kill replica")
        while not self._is_whole(await self._members(http), before if kills_replica else {}):
            if time.monotonic() - at > _RECOVERY_LIMIT_S:
                raise RecoveryError(action)
            await asyncio.sleep(_POLL_S)
        self.deeds.append(Deed(action=action, at=at, recovered_s=time.monotonic() - at))

    async def _members(self, http: httpx.AsyncClient) -> dict[str, int]:
        """Each replica's table version; none while nobody can tell."""
        try:
            response = await http.get("/v1/adapters")
            replicas = response.json()["replicas"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        return {row["replica_id"]: row["table_version"] for row in replicas}

    def _is_whole(self, members: dict[str, int], before: dict[str, int]) -> bool:
        """Whether all replicas agree; ``before`` asks that one of those was replaced."""
        has_all = len(members) == self._served.config.num_replicas
        has_new = not before or bool(members.keys() - before.keys())
        newest = max(members.values(), default=0)
        # While changes go on, a replica may be one behind.
        return has_all and has_new and min(members.values()) >= newest - 1

    def _pick(self, role: Role) -> int | None:
        pids = self._served.pids(role)
        return self._chance.choice(pids) if pids else None

    async def _kill(self, role: Role) -> None:
        pid = self._pick(role)
        if pid is not None:
            _signal(pid, signal.SIGKILL)

    async def _kill_both(self) -> None:
        await self._kill(Role.REPLICA)
        await asyncio.sleep(self._chance.random() * 0.5)
        await self._kill(Role.CONTROLLER)

    async def _pause(self, role: Role) -> None:
        pid = self._pick(role)
        if pid is None:
            return
        _signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._pause_s)
        finally:
            _signal(pid, signal.SIGCONT)

    async def _cut_store(self) -> None:
        """Let every write of the controller to a file fail, as on a full disk."""
        pid = self._pick(Role.CONTROLLER)
        if pid is None:
            return
        async with _no_file_writes(pid):
            await asyncio.sleep(_CUT_S)

    async def _lock_store(self) -> None:
        """Kill the controller and keep its journal locked when the next one starts."""
        await self._kill(Role.CONTROLLER)
        await asyncio.to_thread(self._hold_journal)

    def _hold_journal(self) -> None:
        journal = sqlite3.connect(self._served.journal, timeout=0.5, isolation_level=None)
        try:
            with suppress(sqlite3.OperationalError):  # The next controller was quicker.
                journal.execute("PRAGMA locking_mode=EXCLUSIVE")
                journal.execute("BEGIN EXCLUSIVE")
                time.sleep(_LOCK_S)
        finally:
            journal.close()


@asynccontextmanager
async def _no_file_writes(pid: int) -> AsyncIterator[None]:
    with suppress(ProcessLookupError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        return
    yield


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
