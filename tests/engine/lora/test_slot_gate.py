from engine.lora.slot_gate import SlotGate
from engine.lora.slots import SlotManager

WAIT_S = 10.0


def make_gate(max_loras: int = 2, held: tuple[str, ...] = ("a", "b")) -> SlotGate:
    """A gate whose slots were taken by ``held`` at the times 0, 1, ..."""
    gate = SlotGate(SlotManager(max_loras), WAIT_S)
    for time, digest in enumerate(held):
        gate.begin(float(time))
        assert gate.admits(digest)
        gate.acquire(digest)
    return gate


def admitted(gate: SlotGate, now: float, *digests: str) -> list[bool]:
    gate.begin(now)
    return [gate.admits(digest) for digest in digests]


def test_resident_adapters_overtake_until_the_wait_is_over() -> None:
    gate = make_gate()
    assert admitted(gate, 20.0, "c", "a", "b") == [False, True, True]
    assert admitted(gate, 29.9, "c", "a", "b") == [False, True, True]
    assert admitted(gate, 30.0, "c", "a", "b") == [False, False, True]


def test_longest_holder_is_drained_and_one_slot_per_overdue_adapter() -> None:
    gate = make_gate()
    admitted(gate, 20.0, "c", "d")
    assert admitted(gate, 30.0, "c", "d", "a", "b") == [False, False, False, False]


def test_requests_before_the_overdue_one_are_not_refused() -> None:
    gate = make_gate()
    admitted(gate, 20.0, "c")
    assert admitted(gate, 30.0, "a", "c", "a") == [True, False, False]


def test_slot_is_not_drained_before_its_adapter_had_its_turn() -> None:
    gate = make_gate()
    assert admitted(gate, 10.0, "c", "d", "e") == [False, False, False]
    gate.release("a")
    assert admitted(gate, 15.0, "c") == [True]
    gate.acquire("c")
    assert admitted(gate, 24.0, "d", "e", "c", "b") == [False, False, True, False]
    assert admitted(gate, 25.0, "d", "e", "c", "b") == [False, False, False, False]


def test_pinned_slot_is_not_drained_since_that_would_free_nothing() -> None:
    gate = make_gate()
    gate.slots.pin("a")
    admitted(gate, 20.0, "c")
    assert admitted(gate, 30.0, "c", "a", "b") == [False, True, False]


def test_turn_starts_again_after_the_last_release() -> None:
    gate = make_gate(max_loras=1, held=("a",))
    gate.release("a")
    gate.begin(20.0)
    gate.acquire("a")
    admitted(gate, 20.0, "c")
    assert admitted(gate, 29.9, "c", "a") == [False, True]


def test_wait_is_forgotten_with_its_last_request() -> None:
    gate = make_gate()
    admitted(gate, 20.0, "c")
    gate.forget("c")
    assert admitted(gate, 30.0, "c", "a") == [False, True]


def test_wait_starts_again_after_a_slot_was_had() -> None:
    gate = make_gate(max_loras=1, held=("a",))
    admitted(gate, 20.0, "c")
    gate.release("a")
    assert admitted(gate, 30.0, "c") == [True]
    gate.acquire("c")
    gate.release("c")
    gate.begin(30.0)
    gate.acquire("a")
    assert admitted(gate, 40.0, "c", "a") == [False, True]


def test_pass_is_exhausted_when_every_slot_is_awaited() -> None:
    gate = make_gate()
    admitted(gate, 20.0, "c")
    assert not gate.is_exhausted
    gate.admits("d")
    assert gate.is_exhausted
    gate.begin(21.0)
    assert not gate.is_exhausted
