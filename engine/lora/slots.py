"""Assigns adapters to device slots.

Knows digests, slots, recency, references and pins. Knows nothing of tensors, of where weights live
or of who waits for a slot.
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Activation:
    """An adapter's slot. ``is_new``: its weights must be copied there before use.

    ``evicted`` is the adapter whose place it took.
    """

    slot: int
    evicted: str | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class SlotResidency:
    """Who is in a slot, how many running requests use it, and whether it is pinned."""

    digest: str
    slot: int
    num_refs: int
    is_pinned: bool


class SlotManager:
    """Slots 0 to ``max_loras - 1``, keyed by adapter digest.

    A resident adapter is idle when no request holds it and it is not pinned. Only idle adapters
    give up their slot to another one, the least recently used first.
    """

    def __init__(self, max_loras: int) -> None:
        if max_loras < 1:
            raise ValueError(f"max_loras must be at least 1, got {max_loras}")
        self.max_loras = max_loras
        self._empty = list(reversed(range(max_loras)))
        self._slot_of: dict[str, int] = {}
        self._num_refs: dict[str, int] = {}
        self._pinned: set[str] = set()
        self._idle: OrderedDict[str, None] = OrderedDict()

    @property
    def num_in_use(self) -> int:
        """Slots that running requests hold."""
        return len(self._num_refs)

    def resident(self) -> list[SlotResidency]:
        """List the adapters that are in a slot, by slot."""
        return [
            SlotResidency(digest, slot, self.num_refs(digest), self.is_pinned(digest))
            for digest, slot in sorted(self._slot_of.items(), key=lambda item: item[1])
        ]

    def slot_of(self, digest: str) -> int | None:
        return self._slot_of.get(digest)

    def num_refs(self, digest: str) -> int:
        return self._num_refs.get(digest, 0)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def can_activate(self, digest: str) -> bool:
        """Say whether ``activate`` would find a slot."""
        return digest in self._slot_of or bool(self._empty) or bool(self._idle)

    def activate(self, digest: str) -> Activation | None:
        """Give the adapter a slot; None when every slot is held or pinned."""
        slot = self._slot_of.get(digest)
        if slot is not None:
            if digest in self._idle:
                self._idle.move_to_end(digest)
            return Activation(slot)
        evicted = None
        if self._empty:
            slot = self._empty.pop()
        elif self._idle:
            evicted, _ = self._idle.popitem(last=False)
            slot = self._slot_of.pop(evicted)
        else:
            return None
        self._slot_of[digest] = slot
        self._mark_if_idle(digest)
        return Activation(slot, evicted, is_new=True)

    def hold(self, digest: str) -> None:
        """Keep a resident adapter in its slot while one more request uses it."""
        assert digest in self._slot_of, f"adapter {digest} has no slot to hold"
        self._num_refs[digest] = self._num_refs.get(digest, 0) + 1
        self._idle.pop(digest, None)

    def release(self, digest: str) -> None:
        """Undo one ``hold``."""
        assert digest in self._num_refs, f"adapter {digest} is released more often than held"
        self._num_refs[digest] -= 1
        if self._num_refs[digest] == 0:
            del self._num_refs[digest]
            self._mark_if_idle(digest)

    def pin(self, digest: str) -> None:
        """Keep the adapter in its slot from its next activation on, or from now if it has one.

        Raises CapacityError when that could leave no slot for the adapters that are not pinned:
        their requests would wait for ever.
        """
        if digest not in self._pinned and len(self._pinned) + 1 >= self.max_loras:
            raise CapacityError(
                f"cannot pin another adapter: {len(self._pinned)} of {self.max_loras} slots are "
                f"pinned and one must stay free for the others"
            )
        self._pinned.add(digest)
        self._idle.pop(digest, None)

    def unpin(self, digest: str) -> None:
        """Let the adapter be evicted again. Does nothing when it is not pinned."""
        if digest in self._pinned:
            self._pinned.remove(digest)
            self._mark_if_idle(digest)

    def evict(self, digest: str) -> int | None:
        """Empty the adapter's slot and return it; None when it has none.

        Raises CapacityError when running requests hold it or it is pinned.
        """
        slot = self._slot_of.get(digest)
        if slot is None:
            return None
        if digest not in self._idle:
            raise CapacityError(f"adapter {digest} is in use or pinned and keeps slot {slot}")
        del self._idle[digest]
        del self._slot_of[digest]
        self._empty.append(slot)
        return slot

    def _mark_if_idle(self, digest: str) -> None:
        is_idle = digest not in self._num_refs and digest not in self._pinned
        if is_idle and digest in self._slot_of:
            self._idle[digest] = None
