"""Resolvers are asked in order, and none of them can spoil it for the others."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from adapters import LoRARequest
from resolvers.base import (
    AdapterSourceInvalidError,
    Resolver,
    ResolverError,
    SourceForbiddenError,
    SourceUnavailableError,
)
from resolvers.chain import Link, ResolverChain


class Knows:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append(lora_name)
        if lora_name not in self.names:
            return None
        return LoRARequest(lora_name=lora_name, lora_path=f"/{id(self)}")


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        raise self.error


class Hangs:
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        await asyncio.sleep(3600)
        return None


class Blocks:
    """Written without thought: blocks the thread that runs it."""

    def __init__(self) -> None:
        self.release = threading.Event()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.release.wait(60)
        return None


class AnswersWrongly:
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return LoRARequest(lora_name="other", lora_path="/")


def chain(*resolvers: Resolver, now: Callable[[], float] = time.monotonic) -> ResolverChain:
    links = [Link(type(resolver).__name__, resolver, timeout_s=0.05) for resolver in resolvers]
    return ResolverChain(links, now=now)


async def test_first_that_knows_the_name_answers() -> None:
    one, two, three = Knows("a"), Knows("b"), Knows("b")
    found = await chain(one, two, three).resolve_lora("base", "b")
    assert found is not None and found.lora_path == f"/{id(two)}"
    assert (one.asked, two.asked, three.asked) == (["b"], ["b"], [])


async def test_name_that_nobody_knows_is_none() -> None:
    assert await chain(Knows("a"), Knows()).resolve_lora("base", "b") is None
    assert await chain().resolve_lora("base", "b") is None


@pytest.mark.parametrize(
    "broken",
    [
        Raises(RuntimeError("bug")),
        Raises(asyncio.CancelledError()),
        Raises(SourceUnavailableError("down")),
        Hangs(),
        AnswersWrongly(),
        object(),
    ],
    ids=lambda broken: type(broken).__name__,
)
async def test_broken_resolver_does_not_stop_the_next(broken: Resolver) -> None:
    good = Knows("b")
    found = await chain(broken, good).resolve_lora("base", "b")
    assert found is not None
    with pytest.raises(ResolverError):
        await chain(broken, good).resolve_lora("base", "unknown")


async def test_blocked_thread_stops_nobody_else() -> None:
    blocking = Blocks()
    try:
        found = await chain(blocking, Knows("b")).resolve_lora("base", "b")
        assert found is not None
    finally:
        blocking.release.set()


async def test_message_of_an_unknown_failure_is_not_shown() -> None:
    failing = chain(Raises(RuntimeError("password=hunter2")))
    with pytest.raises(SourceUnavailableError) as caught:
        await failing.resolve_lora("base", "a")
    assert str(caught.value) == "Raises: failed with RuntimeError"


async def test_gravest_reason_is_told() -> None:
    reasons = [
        SourceUnavailableError("down"),
        AdapterSourceInvalidError("too large"),
        SourceForbiddenError("no access"),
    ]
    for expected in (AdapterSourceInvalidError, SourceForbiddenError, SourceUnavailableError):
        with pytest.raises(expected):
            await chain(*map(Raises, reasons)).resolve_lora("base", "a")
        reasons = [reason for reason in reasons if not isinstance(reason, expected)]


async def test_resolver_that_never_answers_is_left_alone_for_a_while() -> None:
    now = 0.0
    hanging = Hangs()
    asked = chain(hanging, now=lambda: now)
    for _ in range(3):
        with pytest.raises(SourceUnavailableError, match="no answer within"):
            await asked.resolve_lora("base", "a")
    with pytest.raises(SourceUnavailableError, match="did not answer lately") as caught:
        await asked.resolve_lora("base", "b")
    assert caught.value.retry_after_s == 15.0
    now = 15.1
    with pytest.raises(SourceUnavailableError, match="no answer within"):
        await asked.resolve_lora("base", "b")


async def test_other_names_are_looked_up_while_one_is_slow() -> None:
    class SlowFor(Knows):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            if lora_name == "slow":
                await asyncio.sleep(3600)
            return await super().resolve_lora(base_model_name, lora_name)

    asked = ResolverChain([Link("slow", SlowFor("b"), timeout_s=60)])
    slow = asyncio.ensure_future(asked.resolve_lora("base", "slow"))
    assert await asked.resolve_lora("base", "b") is not None
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
