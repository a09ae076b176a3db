"""Orders waiting requests by priority and turn, and groups them by who asked and for which adapter.

Knows the order. Knows nothing of budgets, blocks or slots.

Requests of one tenant for one adapter are a flow: first come, first served. Within a priority,
flows take turns, one request each. Turns are numbered in rounds. In each round a tenant has one
turn, whichever of its flows is next; a flow that begins to wait, or has had its turn, gets its
tenant's next one, at the earliest in the round after the current. So a flood delays only its own
flow: a request of another adapter, or of another tenant, is next but one at the latest among two.
And nobody waits for ever: whoever comes later has a later turn, and a round has no more turns than
tenants were waiting when it began. Requests that were running before go first, by arrival.

All requests for one adapter are admissible or not together, so a walk looks at one request per
flow: its cost grows with the flows that wait, not with the requests.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import Request

_FlowId = tuple[str, str | None]


class QueueEntry(NamedTuple):
    """A request's place in a flow: entries sort from first to last.

    A smaller ``priority`` goes first. ``rank`` 0 (was running before) goes before 1 of the same
    priority. ``number`` is unique, so that requests themselves are never compared.
    """

    priority: int
    rank: int
    arrival_s: float
    number: int
    request: Request


class _Head(NamedTuple):
    """The first request of a flow in the order of all flows; ``place`` is its turn or arrival."""

    priority: int
    rank: int
    place: tuple[float, int]
    entry: QueueEntry


@dataclass(slots=True)
class _Flow:
    """Waiting requests in order, and the round and number of their next turn."""

    turn: tuple[int, int]
    entries: list[QueueEntry] = field(default_factory=list)

    def head(self) -> _Head:
        entry = self.entries[0]
        place = self.turn if entry.rank else (entry.arrival_s, entry.number)
        return _Head(entry.priority, entry.rank, place, entry)


def remove_entry(entries: list[QueueEntry], entry: QueueEntry) -> None:
    """Remove an entry from a sorted list that has it."""
    index = bisect_left(entries, entry)
    assert entries[index] is entry, "the entry is not in the queue"
    del entries[index]


class WaitingQueue:
    """The waiting requests of all flows."""

    def __init__(self) -> None:
        # In the order of their turns, but for what was aborted meanwhile.
        self._flows: dict[_FlowId, _Flow] = {}
        self._round = 0
        self._num_turns = 0
        self._last_rounds: dict[str, int] = {}
        self._flows_of_tenant: Counter[str] = Counter()
        self._flows_of_adapter: Counter[str | None] = Counter()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, digest: str | None) -> bool:
        """Say whether any request waits for this adapter (None: for the base model)."""
        return digest in self._flows_of_adapter

    def push(self, entry: QueueEntry) -> None:
        flow_id = _flow_id(entry)
        flow = self._flows.get(flow_id)
        if flow is None:
            flow = self._flows[flow_id] = _Flow(self._next_turn(flow_id[0]))
            self._flows_of_tenant[flow_id[0]] += 1
            self._flows_of_adapter[flow_id[1]] += 1
        insort(flow.entries, entry)
        self._length += 1

    def remove(self, entry: QueueEntry) -> None:
        """Take out a request that gave up waiting. Its flow keeps its turn."""
        flow_id = _flow_id(entry)
        flow = self._flows[flow_id]
        remove_entry(flow.entries, entry)
        self._length -= 1
        if not flow.entries:
            self._forget_flow(*flow_id)

    def admit(self, entry: QueueEntry) -> None:
        """Take out a request that is served now: its flow has had its turn."""
        flow_id = _flow_id(entry)
        flow = self._flows[flow_id]
        self.remove(entry)
        if entry.rank == 0:
            return
        self._round = max(self._round, flow.turn[0])
        if flow.entries:
            flow.turn = self._next_turn(flow_id[0])
            self._flows[flow_id] = self._flows.pop(flow_id)

    def first_of_each(self, *, limit: int, excluding: Set[str | None]) -> list[QueueEntry]:
        """Return the first request for each adapter outside ``excluding``, in order."""
        heads: dict[str | None, _Head] = {}
        for (_, digest), flow in self._flows.items():
            if digest not in excluding:
                head = flow.head()
                heads[digest] = min(heads.get(digest, head), head)
        return [head.entry for head in heapq.nsmallest(limit, heads.values())]

    def walk(self, near: Set[str | None]) -> "QueueWalk":
        """Start a walk in order; ``near`` are the adapters that ``skip_far`` does not skip."""
        near_heads: list[_Head] = []
        far_heads: list[_Head] = []
        for (_, digest), flow in self._flows.items():
            (near_heads if digest in near else far_heads).append(flow.head())
        return QueueWalk(self, near_heads, far_heads)

    def head_after(self, entry: QueueEntry) -> _Head | None:
        """Return what is first now in the flow of a request that was taken out."""
        flow = self._flows.get(_flow_id(entry))
        return None if flow is None else flow.head()

    def _forget_flow(self, tenant: str, digest: str | None) -> None:
        del self._flows[tenant, digest]
        self._flows_of_adapter[digest] -= 1
        if not self._flows_of_adapter[digest]:
            del self._flows_of_adapter[digest]
        self._flows_of_tenant[tenant] -= 1
        if not self._flows_of_tenant[tenant]:
            del self._flows_of_tenant[tenant]
            # Rounds that its aborted requests never used must not count against it.
            del self._last_rounds[tenant]

    def _next_turn(self, tenant: str) -> tuple[int, int]:
        number = max(self._round, self._last_rounds.get(tenant, 0)) + 1
        self._last_rounds[tenant] = number
        self._num_turns += 1
        return (number, self._num_turns)


class QueueWalk:
    """Goes through the queue in order, one request per flow until ``revisit`` asks for more."""

    def __init__(self, queue: WaitingQueue, near: list[_Head], far: list[_Head]) -> None:
        self._queue = queue
        self._near = near
        self._far = far
        heapq.heapify(self._near)
        # Flows are kept in the order of their turns, so this is nearly sorted and sorts fast.
        self._far.sort(reverse=True)

    def next(self) -> QueueEntry | None:
        """Take the next request, None at the end."""
        if self._far and (not self._near or self._far[-1] < self._near[0]):
            return self._far.pop().entry
        return heapq.heappop(self._near).entry if self._near else None

    def revisit(self, entry: QueueEntry) -> None:
        """Let the flow of a request that was admitted have its next turn in this walk too."""
        head = self._queue.head_after(entry)
        if head is not None:
            heapq.heappush(self._near, head)

    def skip_far(self) -> None:
        """Leave out the adapters that are not near."""
        self._far.clear()


def _flow_id(entry: QueueEntry) -> _FlowId:
    return (entry.request.tenant, entry.request.digest)
