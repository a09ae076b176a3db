"""The host cache under pins, holds, removal and many threads."""

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import AdapterNotLoadedError, CapacityError, InvalidAdapterError
from engine.lora.adapter import AdapterInfo, LoRAAdapter
from engine.lora.host_cache import HostCache


def adapter(digest: str) -> LoRAAdapter:
    info = AdapterInfo(
        digest=digest,
        lora_name=f"name-of-{digest}",
        rank=1,
        size_bytes=4,
        target_modules=("q_proj",),
        num_modules=1,
        num_tensors=2,
    )
    return LoRAAdapter(info=info, buffer=torch.zeros(1), modules={})


def filled(*digests: str, size: int = 2) -> HostCache:
    cache = HostCache(size)
    for digest in digests:
        cache.put(adapter(digest))
    return cache


def digests(cache: HostCache) -> list[str]:
    return [item.info.digest for item in cache.resident()]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_least_recently_used_adapter_is_evicted() -> None:
    cache = filled("a", "b")
    cache.get("a")
    cache.put(adapter("c"))
    assert digests(cache) == ["a", "c"]


def test_a_second_put_of_the_same_digest_evicts_nothing() -> None:
    cache = filled("a", "b")
    cache.put(adapter("a"))
    assert digests(cache) == ["b", "a"]


def test_pinned_and_held_adapters_are_never_evicted() -> None:
    cache = filled("a", "b", "c", size=3)
    cache.pin("a")
    cache.hold("b")
    cache.put(adapter("d"))
    assert digests(cache) == ["a", "b", "d"]


def test_no_room_is_a_capacity_error_that_names_the_setting() -> None:
    cache = filled("a", "b")
    cache.pin("a")
    cache.hold("b")
    with pytest.raises(CapacityError, match="max_cpu_loras=2"):
        cache.put(adapter("c"))
    assert digests(cache) == ["a", "b"]


def test_a_full_cache_refuses_before_it_loads() -> None:
    cache = filled("a", size=1)
    cache.pin("a")
    with pytest.raises(CapacityError):
        cache.get_or_load("b", lambda: pytest.fail("loaded for nothing"))


def test_unpin_and_the_last_release_allow_eviction_again() -> None:
    cache = filled("a", size=1)
    cache.pin("a")
    cache.pin("a")
    cache.unpin("a")
    cache.hold("a")
    cache.hold("a")
    cache.release("a")
    with pytest.raises(CapacityError):
        cache.put(adapter("b"))
    cache.release("a")
    cache.put(adapter("b"))
    assert digests(cache) == ["b"]


def test_a_removed_adapter_keeps_its_place_until_the_last_hold_ends() -> None:
    cache = filled("a", size=1)
    with cache.holding("a"):
        assert cache.remove("a")
        assert cache.get("a") is None
        assert digests(cache) == []
        with pytest.raises(CapacityError):
            cache.put(adapter("b"))
    cache.put(adapter("b"))
    assert digests(cache) == ["b"]


def test_a_removed_adapter_that_is_still_held_can_be_put_back() -> None:
    cache = filled("a", size=1)
    cache.hold("a")
    cache.remove("a")
    cache.put(adapter("a"))
    cache.release("a")
    assert digests(cache) == ["a"]


def test_remove_overrules_a_pin_and_tells_whether_it_knew_the_adapter() -> None:
    cache = filled("a")
    cache.pin("a")
    assert cache.remove("a")
    assert not cache.remove("a")


@pytest.mark.parametrize("operation", ["pin", "unpin", "hold"])
def test_an_absent_adapter_cannot_be_kept(operation: str) -> None:
    with pytest.raises(AdapterNotLoadedError, match="digest a"):
        getattr(filled("b"), operation)("a")


def test_simultaneous_callers_share_one_load() -> None:
    cache = HostCache(2)
    started, go_on = threading.Event(), threading.Event()
    loads: list[str] = []
    results: list[LoRAAdapter] = []

    def load() -> LoRAAdapter:
        loads.append("a")
        started.set()
        assert go_on.wait(10)
        return adapter("a")

    def call() -> None:
        results.append(cache.get_or_load("a", load))

    threads = [in_thread(call) for _ in range(4)]
    assert started.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert loads == ["a"]
    assert len({id(result) for result in results}) == 1 and len(results) == 4


def test_loads_of_different_adapters_run_side_by_side() -> None:
    cache = HostCache(2)
    both = threading.Barrier(2, timeout=10)

    def load(digest: str) -> LoRAAdapter:
        both.wait()
        return adapter(digest)

    threads = [
        in_thread(lambda digest=digest: cache.get_or_load(digest, lambda: load(digest)))  # type: ignore[misc]
        for digest in "ab"
    ]
    for thread in threads:
        thread.join(10)
    assert sorted(digests(cache)) == ["a", "b"]


def test_a_failed_load_is_not_remembered() -> None:
    cache = HostCache(1)

    def fail() -> LoRAAdapter:
        raise InvalidAdapterError("damaged")

    with pytest.raises(InvalidAdapterError):
        cache.get_or_load("a", fail)
    assert cache.get_or_load("a", lambda: adapter("a")).digest == "a"


def test_an_adapter_removed_while_it_loads_does_not_come_back() -> None:
    cache = HostCache(1)

    def load() -> LoRAAdapter:
        assert cache.remove("a")
        return adapter("a")

    with pytest.raises(AdapterNotLoadedError, match="removed while"):
        cache.get_or_load("a", load)
    assert digests(cache) == []
    assert cache.get_or_load("a", lambda: adapter("a")).digest == "a"


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of operations against the rules, kept in plain sets."""

    names = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.cache = HostCache(2)
        self.pinned: set[str] = set()
        self.holds: dict[str, int] = {}

    @rule(name=names)
    def put(self, name: str) -> None:
        before = set(digests(self.cache))
        try:
            self.cache.put(adapter(name))
        except CapacityError:
            assert len(self.pinned | self.holds.keys()) == 2
            return
        assert name in digests(self.cache)
        evicted = before - set(digests(self.cache))
        assert len(evicted) <= 1 and not evicted & (self.pinned | self.holds.keys())

    @rule(name=names)
    def pin(self, name: str) -> None:
        if self.cache.get(name) is not None:
            self.cache.pin(name)
            self.pinned.add(name)

    @rule(name=names)
    def unpin(self, name: str) -> None:
        if self.cache.get(name) is not None:
            self.cache.unpin(name)
            self.pinned.discard(name)

    @rule(name=names)
    def hold(self, name: str) -> None:
        if self.cache.get(name) is not None:
            self.cache.hold(name)
            self.holds[name] = self.holds.get(name, 0) + 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.holds)))
        self.cache.release(name)
        self.holds[name] -= 1
        if not self.holds[name]:
            del self.holds[name]

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.cache.remove(name)
        self.pinned.discard(name)
        assert self.cache.get(name) is None

    @invariant()
    def pinned_ones_stay_and_the_bound_holds(self) -> None:
        resident = set(digests(self.cache))
        assert self.pinned <= resident
        assert len(resident | self.holds.keys()) <= 2


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
