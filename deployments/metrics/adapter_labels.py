"""A bounded number of adapters get a label of their own; the rest share one.

A label that was not used for a while may be given to another adapter. Its series then end, and
those of all other labels still only grow.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

# No adapter can have this name.
OTHER = "(other)"

MAX_LABELS = 100
IDLE_S = 3600.0


class AdapterLabels:
    """Which adapters have labels. ``forget`` ends the series of one that lost its own."""

    def __init__(
        self,
        forget: Callable[[str], None],
        *,
        max_labels: int = MAX_LABELS,
        idle_s: float = IDLE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forget = forget
        self._max_labels = max_labels
        self._idle_s = idle_s
        self._now = now
        self._used_at: OrderedDict[str, float] = OrderedDict()

    def label(self, adapter: str) -> str:
        """The label under which an adapter is counted now."""
        now = self._now()
        if adapter not in self._used_at and not self._make_room(now):
            return OTHER
        self._used_at[adapter] = now
        self._used_at.move_to_end(adapter)
        return adapter

    def _make_room(self, now: float) -> bool:
        if len(self._used_at) < self._max_labels:
            return True
        oldest, used_at = next(iter(self._used_at.items()))
        if now - used_at < self._idle_s:
            return False
        del self._used_at[oldest]
        self._forget(oldest)
        return True
