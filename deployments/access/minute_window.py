"""Adds up what happened in the last minute.

Knows amounts and a time that only grows. Knows nothing of what is counted.
"""

from collections import deque

_MINUTE_S = 60


class MinuteWindow:
    """Sums by the second: a second leaves the sum once all of it is a minute ago.

    So whoever keeps the sum at or below a limit keeps it so in every span of 60 seconds. A clock
    that steps back is taken to stand still.
    """

    def __init__(self) -> None:
        self._cells: deque[list[int]] = deque()
        self._total = 0

    def total(self, now: float) -> int:
        """Return the sum of the last minute."""
        while self._cells and self._cells[0][0] + 1 + _MINUTE_S <= now:
            self._total -= self._cells.popleft()[1]
        return self._total

    def add(self, now: float, amount: int) -> int:
        """Count an amount; returns its second, for ``take_back``."""
        self.total(now)
        second = int(now)
        if self._cells and self._cells[-1][0] >= second:
            second = self._cells[-1][0]
            self._cells[-1][1] += amount
        else:
            self._cells.append([second, amount])
        self._total += amount
        return second

    def take_back(self, second: int, amount: int) -> None:
        """Undo a part of what was counted in a second, unless that has left the sum."""
        for cell in self._cells:
            if cell[0] == second:
                cell[1] -= amount
                self._total -= amount

    def wait_s(self, now: float, amount: int) -> float:
        """Return how long it takes until the sum is at most this much."""
        total, free_at = self.total(now), now
        for second, part in self._cells:
            if total <= amount:
                break
            total -= part
            free_at = second + 1 + _MINUTE_S
        return max(0.0, free_at - now)
