import pytest

from engine.errors import CapacityError
from engine.lora.slots import Activation, SlotManager, SlotResidency


def test_new_adapters_get_the_slots_in_order() -> None:
    slots = SlotManager(max_loras=2)
    assert slots.activate("a") == Activation(0, is_new=True)
    assert slots.activate("b") == Activation(1, is_new=True)


def test_resident_adapter_keeps_its_slot() -> None:
    slots = SlotManager(max_loras=2)
    slots.activate("a")
    assert slots.activate("a") == Activation(0)


def test_least_recently_used_slot_is_reused_when_full() -> None:
    slots = SlotManager(max_loras=2)
    slots.activate("a")
    slots.activate("b")
    slots.activate("a")
    assert slots.activate("c") == Activation(1, evicted="b", is_new=True)
    assert slots.slot_of("b") is None


def test_use_ends_with_the_release() -> None:
    slots = SlotManager(max_loras=2)
    for digest in ("a", "b"):
        slots.activate(digest)
        slots.hold(digest)
    slots.release("b")
    slots.release("a")
    activation = slots.activate("c")
    assert activation is not None and activation.evicted == "b"


def test_held_slots_are_never_taken() -> None:
    slots = SlotManager(max_loras=1)
    slots.activate("a")
    slots.hold("a")
    slots.hold("a")
    slots.release("a")
    assert not slots.can_activate("b")
    assert slots.activate("b") is None
    with pytest.raises(CapacityError, match="in use or pinned"):
        slots.evict("a")
    slots.release("a")
    assert slots.can_activate("b")


def test_release_without_hold_is_noticed() -> None:
    slots = SlotManager(max_loras=1)
    slots.activate("a")
    with pytest.raises(AssertionError, match="more often than held"):
        slots.release("a")


def test_hold_needs_a_slot() -> None:
    with pytest.raises(AssertionError, match="no slot"):
        SlotManager(max_loras=1).hold("a")


def test_pinned_slot_is_never_taken_until_unpinned() -> None:
    slots = SlotManager(max_loras=2)
    slots.activate("a")
    slots.pin("a")
    slots.activate("b")
    activation = slots.activate("c")
    assert activation is not None and activation.evicted == "b"
    with pytest.raises(CapacityError, match="in use or pinned"):
        slots.evict("a")
    slots.unpin("a")
    assert slots.evict("a") == 0


def test_pin_before_activation_holds_from_then_on() -> None:
    slots = SlotManager(max_loras=2)
    slots.pin("a")
    slots.activate("a")
    slots.activate("b")
    activation = slots.activate("c")
    assert activation is not None and activation.evicted == "b"


def test_unpinned_adapter_in_use_stays_held() -> None:
    slots = SlotManager(max_loras=2)
    slots.activate("a")
    slots.hold("a")
    slots.pin("a")
    slots.unpin("a")
    slots.activate("b")
    activation = slots.activate("c")
    assert activation is not None and activation.evicted == "b"


def test_one_slot_always_stays_free_of_pins() -> None:
    slots = SlotManager(max_loras=2)
    slots.pin("a")
    slots.pin("a")
    with pytest.raises(CapacityError, match="one must stay free"):
        slots.pin("b")
    slots.unpin("a")
    slots.unpin("a")
    slots.pin("b")
    assert slots.is_pinned("b") and not slots.is_pinned("a")


def test_evicted_slot_is_empty() -> None:
    slots = SlotManager(max_loras=2)
    slots.activate("a")
    assert slots.evict("a") == 0
    assert slots.evict("a") is None
    assert slots.activate("b") == Activation(0, is_new=True)


def test_residents_are_listed_by_slot() -> None:
    slots = SlotManager(max_loras=3)
    slots.activate("b")
    slots.activate("a")
    slots.hold("a")
    slots.pin("b")
    assert slots.resident() == [
        SlotResidency("b", 0, num_refs=0, is_pinned=True),
        SlotResidency("a", 1, num_refs=1, is_pinned=False),
    ]
    assert slots.num_in_use == 1


def test_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlotManager(max_loras=0)
