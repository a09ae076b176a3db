"""Orders waiting requests by priority and arrival, and groups them by adapter.

Knows the order. Knows nothing of budgets, blocks or slots.

All requests of one adapter are admissible or not together, so a walk looks at one request per
adapter: its cost grows with the adapters that wait, not with the requests.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Set
from typing import NamedTuple

from engine.request import Request


class QueueEntry(NamedTuple):
    """A request's place in a queue: entries sort from first to last.

    A smaller ``priority`` goes first. ``rank`` 0 (was running before) goes before 1 of the same
    priority. ``number`` is unique, so that requests themselves are never compared.
    """

    priority: int
    rank: int
    arrival_s: float
    number: int
    request: Request


def remove_entry(entries: list[QueueEntry], entry: QueueEntry) -> None:
    """Remove an entry from a sorted list that has it."""
    index = bisect_left(entries, entry)
    assert entries[index] is entry, "the entry is not in the queue"
    del entries[index]


class WaitingQueue:
    """The waiting requests of each adapter, first come first."""

    def __init__(self) -> None:
        self._groups: dict[str | None, list[QueueEntry]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, digest: str | None) -> bool:
        """Say whether any request waits for this adapter (None: for the base model)."""
        return digest in self._groups

    def push(self, entry: QueueEntry) -> None:
        insort(self._groups.setdefault(entry.request.digest, []), entry)
        self._length += 1

    def remove(self, entry: QueueEntry) -> None:
        digest = entry.request.digest
        group = self._groups[digest]
        remove_entry(group, entry)
        self._length -= 1
        if not group:
            del self._groups[digest]

    def first(self, digest: str | None) -> QueueEntry | None:
        group = self._groups.get(digest)
        return None if group is None else group[0]

    def first_of_each(self, *, limit: int, excluding: Set[str | None]) -> list[QueueEntry]:
        """Return the first request of each adapter outside ``excluding``, in order."""
        heads = (group[0] for digest, group in self._groups.items() if digest not in excluding)
        return heapq.nsmallest(limit, heads)

    def walk(self, near: Set[str | None]) -> "QueueWalk":
        """Start a walk in order; ``near`` are the adapters that ``skip_far`` does not skip."""
        groups = self._groups
        near_heads = [groups[digest][0] for digest in near if digest in groups]
        far_heads = [group[0] for digest, group in groups.items() if digest not in near]
        return QueueWalk(self, near_heads, far_heads)


class QueueWalk:
    """Goes through the queue in order, one request per adapter until ``revisit`` asks for more."""

    def __init__(self, queue: WaitingQueue, near: list[QueueEntry], far: list[QueueEntry]) -> None:
        self._queue = queue
        self._near = near
        self._far = far
        heapq.heapify(self._near)
        # Groups come about in the order of arrival, so this is nearly sorted and sorts fast.
        self._far.sort(reverse=True)

    def next(self) -> QueueEntry | None:
        """Take the next request, None at the end."""
        if self._far and (not self._near or self._far[-1] < self._near[0]):
            return self._far.pop()
        return heapq.heappop(self._near) if self._near else None

    def revisit(self, digest: str | None) -> None:
        """Let the adapter's next waiting request, if any, take its turn too."""
        head = self._queue.first(digest)
        if head is not None:
            heapq.heappush(self._near, head)

    def skip_far(self) -> None:
        """Leave out the adapters that are not near."""
        self._far.clear()
