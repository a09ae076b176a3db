"""Counts what keys and adapters take, and says no before a limit is passed.

One event loop uses it and nothing here waits, so checking and counting are one act. Knows names
and amounts. Knows nothing of HTTP, or of what else runs in the cluster: the limits that it is given
are this process' share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deployments.access.key_holder import Limits
from deployments.access.minute_window import MinuteWindow
from deployments.clock import Clock
from deployments.errors import LimitExceededError

# How soon to try again for a place that a running request holds.
_RETRY_RUNNING_S = 1.0
_MIN_PRUNED = 1024


@dataclass(slots=True)
class _Account:
    """What one key or one adapter has taken."""

    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)
    num_running: int = 0

    def is_idle(self, now: float) -> bool:
        return not (self.num_running or self.requests.total(now) or self.tokens.total(now))


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits, and whose they are: ``whose`` is for people, and tells accounts apart."""

    whose: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Standing:
    """How much is left of the tightest limit of one kind, and when all of it is free again."""

    limit: int
    remaining: int
    reset_s: float


class Limiter:
    """The accounts of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._prune_at = _MIN_PRUNED

    @property
    def num_running(self) -> int:
        """Places taken at the moment, over all accounts."""
        return sum(account.num_running for account in self._accounts.values())

    def admit(self, quotas: Sequence[Quota], num_tokens: int) -> "Ticket":
        """Count one request with this many expected tokens on every account, or on none.

        Raises LimitExceededError. A request that expects more than a whole minute's tokens is let
        in when the minute is empty.
        """
        self._prune()
        now = self._clock.now()
        accounts = [self._accounts.get(quota.whose) or _Account() for quota in quotas]
        for quota, account in zip(quotas, accounts, strict=True):
            _check(quota, account, num_tokens, now)
        for quota, account in zip(quotas, accounts, strict=True):
            self._accounts[quota.whose] = account
            account.num_running += 1
            account.requests.add(now, 1)
        return Ticket(self._clock, quotas, accounts, num_tokens)

    def requests_left(self, quotas: Sequence[Quota]) -> Standing | None:
        """How many more requests the tightest limit allows; None without a limit."""
        return self._tightest(
            (self._accounts.get(quota.whose, _Account()).requests, quota.limits.requests_per_minute)
            for quota in quotas
        )

    def tokens_left(self, quotas: Sequence[Quota]) -> Standing | None:
        """How many more tokens the tightest limit allows; None without a limit."""
        return self._tightest(
            (self._accounts.get(quota.whose, _Account()).tokens, quota.limits.tokens_per_minute)
            for quota in quotas
        )

    def _tightest(self, windows: Iterable[tuple[MinuteWindow, int | None]]) -> Standing | None:
        now = self._clock.now()
        standings = [
            Standing(limit, max(0, limit - window.total(now)), window.wait_s(now, 0))
            for window, limit in windows
            if limit is not None
        ]
        return min(standings, key=lambda standing: standing.remaining, default=None)

    def _prune(self) -> None:
        """Forget idle accounts now and then: adapters' names come from clients."""
        if len(self._accounts) < self._prune_at:
            return
        now = self._clock.now()
        for whose in [w for w, account in self._accounts.items() if account.is_idle(now)]:
            del self._accounts[whose]
        self._prune_at = max(_MIN_PRUNED, 2 * len(self._accounts))


class Ticket:
    """An admitted request's places and tokens. ``close`` gives back what it does not use.

    Expected tokens are counted at once. What is spent beyond them is counted as it is spent.
    """

    def __init__(
        self, clock: Clock, quotas: Sequence[Quota], accounts: Sequence[_Account], num_tokens: int
    ) -> None:
        self._clock = clock
        self._quotas = quotas
        self._accounts = accounts
        self._is_open = True
        self._num_counted = num_tokens
        self._num_spent = 0
        now = clock.now()
        self._seconds = [account.tokens.add(now, num_tokens) for account in accounts]

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def spend(self, num_tokens: int) -> None:
        """Note tokens that were computed."""
        self._num_spent += num_tokens
        beyond = self._num_spent - self._num_counted
        if beyond > 0 and self._is_open:
            self._num_counted += beyond
            for account in self._accounts:
                account.tokens.add(self._clock.now(), beyond)

    def close(self) -> None:
        """Free the places; of the expected tokens, give back what was not spent. Once."""
        if not self._is_open:
            return
        self._is_open = False
        unspent = self._num_counted - self._num_spent
        for account, second in zip(self._accounts, self._seconds, strict=True):
            account.num_running -= 1
            account.tokens.take_back(second, unspent)


def _check(quota: Quota, account: _Account, num_tokens: int, now: float) -> None:
    limits = quota.limits
    places = limits.concurrent_requests
    if places is not None and account.num_running >= places:
        raise LimitExceededError(quota.whose, "concurrent_requests", places, _RETRY_RUNNING_S)
    for kind, window, limit, amount in (
        ("requests_per_minute", account.requests, limits.requests_per_minute, 1),
        ("tokens_per_minute", account.tokens, limits.tokens_per_minute, max(1, num_tokens)),
    ):
        wait_s = 0.0 if limit is None else window.wait_s(now, max(0, limit - amount))
        if limit is not None and wait_s:
            raise LimitExceededError(quota.whose, kind, limit, wait_s)
