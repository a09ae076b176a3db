"""Remembers for a moment that a name led nowhere, and why."""

from collections import OrderedDict

from deployments.clock import Clock

# Names come from clients, so the memory for wrong ones is bounded.
_MAX_ENTRIES = 10_000


class NegativeCache:
    """Errors by name, each for a short time."""

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, Exception]] = OrderedDict()

    def raise_for(self, name: str) -> None:
        """Raise the name's remembered error, if there is one."""
        entry = self._entries.get(name)
        if entry is None:
            return
        expires_at, error = entry
        if expires_at <= self._clock.now():
            del self._entries[name]
            return
        raise error.with_traceback(None)

    def put(self, name: str, error: Exception) -> None:
        """Remember an error."""
        self._entries[name] = (self._clock.now() + self._ttl_s, error)
        self._entries.move_to_end(name)
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget a name's error."""
        self._entries.pop(name, None)
