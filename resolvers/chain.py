"""Asks resolvers in order, and keeps each one's failures to itself.

A resolver that raises, hangs, blocks its thread or is slow costs at most its time-out, and none at
all once it has failed to answer a few times in a row. The next ones are asked all the same. Knows
nothing of what a resolver does.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adapters import LoRARequest
from resolvers.base import (
    AdapterSourceInvalidError,
    Resolver,
    ResolverError,
    SourceForbiddenError,
    SourceUnavailableError,
)

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 30.0

# Names that one resolver looks up at the same time; more wait, within their time-out.
_MAX_CONCURRENT = 32
# After this many unanswered calls in a row a resolver is left alone for a while.
_MAX_UNANSWERED = 3
_PAUSE_S = 15.0


@dataclass(frozen=True, slots=True)
class Link:
    """One resolver of the chain, and how long it may take for one name."""

    name: str
    resolver: Resolver
    timeout_s: float = DEFAULT_TIMEOUT_S


class ResolverChain:
    """Resolvers, each in a thread of its own, asked until one knows the name."""

    def __init__(self, links: Sequence[Link], *, now: Callable[[], float] = time.monotonic) -> None:
        self._resolvers = [_IsolatedResolver(link, now) for link in links]

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the first answer, or None if every resolver says "not mine".

        If none has the adapter but some could not say, raises the gravest of their reasons.
        """
        failures: list[ResolverError] = []
        for resolver in self._resolvers:
            try:
                found = await resolver.resolve_lora(base_model_name, lora_name)
            except ResolverError as error:
                logger.warning("adapter %s: %s", lora_name, error)
                failures.append(error)
                continue
            if found is not None:
                return found
        if failures:
            raise min(failures, key=_severity)
        return None


class _IsolatedResolver:
    def __init__(self, link: Link, now: Callable[[], float]) -> None:
        self._link = link
        self._now = now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(_MAX_CONCURRENT)
        self._unanswered = 0
        self._paused_until = 0.0

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if self._now() < self._paused_until:
            raise self._unavailable("did not answer lately", self._paused_until - self._now())
        try:
            async with asyncio.timeout(self._link.timeout_s), self._places:
                found = await self._call(base_model_name, lora_name)
        except TimeoutError as error:
            self._count_unanswered()
            raise self._unavailable(f"no answer within {self._link.timeout_s:g} s") from error
        except ResolverError:
            self._unanswered = 0
            raise
        except Exception as error:
            self._unanswered = 0
            # What a plug-in raises may hold anything, so only its kind is shown to callers.
            logger.exception("resolver %s failed for adapter %s", self._link.name, lora_name)
            raise self._unavailable(f"failed with {type(error).__name__}") from error
        self._unanswered = 0
        if found is not None and found.lora_name != lora_name:
            raise AdapterSourceInvalidError(f"{self._link.name}: answered for another name")
        return found

    async def _call(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        async def ask() -> LoRARequest | None:
            try:
                return await self._link.resolver.resolve_lora(base_model_name, lora_name)
            except asyncio.CancelledError as error:
                # Ours to raise only; if we have, nobody waits for this any more.
                raise self._unavailable("cancelled itself") from error

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), self._own_loop()))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """A loop in a thread of its own: one that blocks it stops nobody else."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            name = f"resolver-{self._link.name}"
            threading.Thread(target=_run, args=(loop,), name=name, daemon=True).start()
            self._loop = loop
        return self._loop

    def _count_unanswered(self) -> None:
        self._unanswered += 1
        if self._unanswered >= _MAX_UNANSWERED:
            self._unanswered = 0
            self._paused_until = self._now() + _PAUSE_S

    def _unavailable(self, why: str, retry_after_s: float | None = None) -> SourceUnavailableError:
        return SourceUnavailableError(f"{self._link.name}: {why}", retry_after_s=retry_after_s)

    def __del__(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _severity(error: ResolverError) -> int:
    """What the caller should hear first: what it can act on, then what may pass."""
    kinds = (AdapterSourceInvalidError, SourceForbiddenError, SourceUnavailableError)
    return next((rank for rank, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
