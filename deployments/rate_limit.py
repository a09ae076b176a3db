"""Bounds how often something may happen, with room for bursts."""

from deployments.clock import Clock


class RateLimit:
    """A token bucket: ``per_s`` a second in the long run, twice that many at once."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s = per_s
        self._clock = clock
        self._tokens = self._burst = max(1.0, 2 * per_s)
        self._updated_at = clock.now()

    def try_take(self) -> bool:
        """Whether it may happen now; if so, it is counted."""
        now = self._clock.now()
        refill = (now - self._updated_at) * self._per_s
        self._tokens = min(self._burst, self._tokens + refill)
        self._updated_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
