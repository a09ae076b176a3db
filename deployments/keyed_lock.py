"""One lock per key, forgotten when nobody uses it: order within a key, freedom between keys."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager


class KeyedLock:
    """Serialises work on the same key, first come first served."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, *keys: str) -> AsyncIterator[None]:
        """Wait for the turn of all these keys and keep others out of them meanwhile."""
        async with AsyncExitStack() as stack:
            # In the same order for all who need several, so that no two wait for each other.
            for key in sorted(set(keys)):
                await stack.enter_async_context(self._hold_one(key))
            yield

    @asynccontextmanager
    async def _hold_one(self, key: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                del self._locks[key]
