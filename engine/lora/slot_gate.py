"""Decides which adapter's requests may use a slot now, so that slots are shared fairly.

Knows slots and how long adapters have held or awaited one. Knows nothing of requests or blocks.

While every slot is held, an adapter outside waits, and later requests for adapters inside overtake
it. Two rules bound that, both with the same time w (``max_wait_s``):

* An adapter that has waited w is overdue. For each overdue adapter one slot is drained: later
  requests for its adapter are refused, so that the slot empties when its running requests end.
* A slot is drained only after its adapter has held it for w, the longest holder first. This lets an
  adapter start all its waiting requests in one turn instead of one request per turn.

So adapters take turns. A wait counts from the first pass that reaches the adapter: every earlier
request then runs or waits for a slot too. With S slots that are not pinned, T the time the longest
running request needs to end, and requests of equal priority, the k-th adapter that waits gets a
slot at the latest after ceil(k / S) * (w + T). A larger w keeps batches fuller, a smaller one makes
waits shorter. The base model needs no slot and is never refused.
"""

from dataclasses import dataclass
from itertools import islice

from engine.lora.slots import Activation, SlotManager


@dataclass(slots=True)
class _Turn:
    """One pass of admissions: the time, and whom it found waiting for a slot so far."""

    now: float
    num_blocked: int = 0
    num_overdue: int = 0


class SlotGate:
    """Fair admission of adapters to the slots of one SlotManager.

    ``begin`` starts a pass over the waiting requests; the pass must go in the queue's order.
    """

    def __init__(self, slots: SlotManager, max_wait_s: float) -> None:
        self.slots = slots
        self._max_wait_s = max_wait_s
        self._turn = _Turn(now=0.0)
        self._waiting_since: dict[str, float] = {}
        # In order of time: an adapter is put at the end whenever its first running request starts.
        self._held_since: dict[str, float] = {}

    @property
    def is_exhausted(self) -> bool:
        """So many adapters wait for a slot that further ones need not be looked at in this pass."""
        return self._turn.num_blocked >= self.slots.max_loras

    def begin(self, now: float) -> None:
        self._turn = _Turn(now)

    def admits(self, digest: str) -> bool:
        """Say whether one more request for the adapter may run; if not, its wait is timed."""
        if self.slots.slot_of(digest) is not None:
            return not self._is_draining(digest)
        if self.slots.can_activate(digest):
            return True
        since = self._waiting_since.setdefault(digest, self._turn.now)
        self._turn.num_blocked += 1
        self._turn.num_overdue += self._turn.now - since >= self._max_wait_s
        return False

    def acquire(self, digest: str) -> Activation:
        """Take the slot of an adapter that ``admits`` let in, for one more running request."""
        activation = self.slots.activate(digest)
        assert activation is not None, "admits() found a slot"
        self.slots.hold(digest)
        self._held_since.setdefault(digest, self._turn.now)
        self._waiting_since.pop(digest, None)
        return activation

    def release(self, digest: str) -> None:
        """Give back what ``acquire`` took."""
        self.slots.release(digest)
        if self.slots.num_refs(digest) == 0:
            del self._held_since[digest]

    def forget(self, digest: str) -> None:
        """Note that no request waits for the adapter any more."""
        self._waiting_since.pop(digest, None)

    def _is_draining(self, digest: str) -> bool:
        if not self._turn.num_overdue:
            return False
        drainable = (
            held
            for held, since in self._held_since.items()
            if self._turn.now - since >= self._max_wait_s and not self.slots.is_pinned(held)
        )
        return digest in islice(drainable, self._turn.num_overdue)
