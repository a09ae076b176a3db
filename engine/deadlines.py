"""Finds the requests whose deadline has passed, without looking at the others.

Knows requests and when they are due. Knows nothing of queues.
"""

import heapq
import math

from engine.request import Request, RequestStatus

_MIN_SWEPT = 1024


class Deadlines:
    """The requests that have a deadline; those that finished meanwhile are passed over."""

    def __init__(self) -> None:
        # The number keeps requests from being compared.
        self._due: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._sweep_at = _MIN_SWEPT

    def add(self, request: Request) -> None:
        """Follow a request until it has finished."""
        if request.deadline_s == math.inf:
            return
        if len(self._due) >= self._sweep_at:
            self._due = [item for item in self._due if _is_open(item[2])]
            heapq.heapify(self._due)
            self._sweep_at = max(_MIN_SWEPT, 2 * len(self._due))
        self._num_added += 1
        heapq.heappush(self._due, (request.deadline_s, self._num_added, request))

    def next_s(self) -> float:
        """Return when the next open request is due; infinity if none is."""
        while self._due and not _is_open(self._due[0][2]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def take_passed(self, now: float) -> list[Request]:
        """Return the open requests that were due by now, and forget them."""
        passed = []
        while self.next_s() <= now:
            passed.append(heapq.heappop(self._due)[2])
        return passed


def _is_open(request: Request) -> bool:
    return request.status is not RequestStatus.FINISHED
