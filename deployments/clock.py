"""Time as an argument: leases and time-outs are tested without waiting."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

# Goes on while the machine sleeps, which time.monotonic() does not on Linux: a lease must end then.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """A clock that can be waited on."""

    def now(self) -> float:
        """Seconds that only grow, from an arbitrary start."""

    def wall(self) -> float:
        """Seconds since the epoch, for people."""

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds of ``now``."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Seconds that only grow, from an arbitrary start."""
        return time.clock_gettime(_CLOCK)

    def wall(self) -> float:
        """Seconds since the epoch, for people."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds of ``now``."""
        await asyncio.sleep(seconds)


class Signal:
    """Wakes everybody who waits for something to change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait_until(self, holds: Callable[[], bool], *, deadline: float) -> bool:
        """Wait until ``holds()``, looked at after every notification, or until the deadline.

        Returns whether it holds.
        """
        while not holds():
            left = deadline - self._clock.now()
            if left <= 0:
                return False
            await self._wait(left)
        return True

    async def _wait(self, timeout_s: float) -> None:
        changed = asyncio.ensure_future(self._event.wait())
        expired = asyncio.ensure_future(self._clock.sleep(timeout_s))
        try:
            await asyncio.wait((changed, expired), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            expired.cancel()
