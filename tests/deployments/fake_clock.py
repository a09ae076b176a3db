"""A clock that moves only when a test says so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_STEP_S = 0.05
# Threads may also wait for what a later step does.
_MAX_THREAD_WAITS = 300


class FakeClock:
    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: set[tuple[float, asyncio.Future[None]]] = set()

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return await asyncio.sleep(0)
        sleeper = (self._now + seconds, asyncio.get_running_loop().create_future())
        self._sleepers.add(sleeper)
        try:
            await sleeper[1]
        finally:
            self._sleepers.discard(sleeper)

    async def advance(self, seconds: float) -> None:
        """Let time pass in small steps, and everybody act in between."""
        end = self._now + seconds
        while self._now < end - 1e-9:
            self._now = min(end, self._now + _STEP_S)
            await finish_threads()
            for wake_at, future in tuple(self._sleepers):
                if wake_at <= self._now and not future.done():
                    future.set_result(None)
            await settle()

    async def finish(self, work: Awaitable[T], *, within_s: float = 60.0) -> T:
        """Let time pass until the work is done; fails if it takes longer."""
        task = asyncio.ensure_future(work)
        end = self._now + within_s
        while not task.done():
            await finish_threads()
            if task.done():
                break
            assert self._now < end, "not finished in time"
            await self.advance(_STEP_S)
        return task.result()

    async def until(self, holds: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Let time pass until something holds."""

        end = self._now + within_s
        while not holds():
            await finish_threads()
            assert self._now < end, "did not happen in time"
            await self.advance(_STEP_S)


class SteppedClock(FakeClock):
    """Jumps, where told to even backwards, which a clock should not."""

    def step(self, seconds: float) -> None:
        self._now += seconds


async def finish_threads() -> None:
    """Let work in threads end, which takes no time by this clock."""
    executor = asyncio.get_running_loop()._default_executor  # type: ignore[attr-defined]
    for _ in range(_MAX_THREAD_WAITS):
        await asyncio.sleep(0.001)
        if executor is None or executor._idle_semaphore._value == len(executor._threads):
            return


async def settle() -> None:
    """Let every task that can act do so."""
    for _ in range(30):
        await asyncio.sleep(0)
