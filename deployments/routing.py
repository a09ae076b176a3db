"""Which replica gets a request: one that holds the adapter, unless it is much busier than others.

``rank_replicas`` is the policy, over plain data. ``AdapterRouter`` feeds it from what Ray Serve
knows and needs nothing but Serve's router interface.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

_NUM_CHOICES = 2
_CHOICE_TTL_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What is known of a replica here and now, possibly a little late.

    ``load`` is the number of requests that it has; ``has_adapter`` says whether the weights of the
    request's adapter are in its memory.
    """

    id: str
    load: int
    has_adapter: bool = False


def rank_replicas(
    replicas: Sequence[ReplicaView], adapter: str, spill_over: int
) -> list[list[str]]:
    """Order replicas by preference: within a rank the one with most room is taken.

    For the base model, two random replicas come first (the power of two choices), then all. For an
    adapter, the first is a replica that holds it, unless that has more than ``spill_over`` requests
    more than the least loaded. If none holds it, one is chosen by the adapter's name, so that the
    requests which follow at once go there too.
    """
    if not replicas:
        return []
    if not adapter:
        chosen = random.sample(list(replicas), min(_NUM_CHOICES, len(replicas)))
        return _ranks([replica.id for replica in chosen], replicas)
    limit = min(replica.load for replica in replicas) + spill_over
    near = [replica for replica in replicas if replica.load <= limit]
    holders = [replica for replica in near if replica.has_adapter]
    if holders:
        best = min(holders, key=lambda replica: (replica.load, _affinity(adapter, replica.id)))
    else:
        best = min(near, key=lambda replica: _affinity(adapter, replica.id))
    return _ranks([best.id], replicas)


def _ranks(first: list[str], replicas: Sequence[ReplicaView]) -> list[list[str]]:
    rest = [replica.id for replica in replicas if replica.id not in first]
    return [first, rest] if rest else [first]


def _affinity(adapter: str, replica_id: str) -> bytes:
    """Rendezvous hashing: each adapter has its own order of replicas."""
    return blake2b(f"{adapter}\0{replica_id}".encode(), digest_size=8).digest()


class RecentChoices:
    """Requests that were given a replica and are not yet counted by it.

    Without them, a burst would see all replicas idle and go to one. A choice that never became a
    request (the client went away) is forgotten after a moment.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._choices: dict[str, tuple[str, float]] = {}

    def add(self, request_id: str, replica_id: str) -> None:
        """Count a request for a replica."""
        self._drop_old()
        self._choices[request_id] = (replica_id, self._now())

    def forget(self, request_id: str) -> None:
        """Stop counting a request."""
        self._choices.pop(request_id, None)

    def count(self, replica_id: str) -> int:
        """How many requests are on their way to a replica."""
        return sum(chosen == replica_id for chosen, _ in self._choices.values())

    def _drop_old(self) -> None:
        # Oldest first, as a dictionary keeps its order of insertion.
        limit = self._now() - _CHOICE_TTL_S
        while self._choices:
            request_id, (_, chosen_at) = next(iter(self._choices.items()))
            if chosen_at >= limit:
                return
            del self._choices[request_id]


class AdapterRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Ray Serve's router with the policy above. The adapter is the request's multiplexed id."""

    def initialize_state(self, *, spill_over: int) -> None:
        """Take the arguments of ``RequestRouterConfig``."""
        self._spill_over = spill_over
        self._choices = RecentChoices()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates in ranks of preference."""
        adapter = request_id = ""
        if pending_request is not None:
            adapter = pending_request.metadata.multiplexed_model_id
            request_id = pending_request.metadata.internal_request_id
        self._choices.forget(request_id)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        views = [self._view(replica, adapter) for replica in candidate_replicas]
        ranks = rank_replicas(views, adapter, self._spill_over)
        if ranks and request_id:
            self._choices.add(request_id, ranks[0][0])
        return [[by_id[replica_id] for replica_id in rank] for rank in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """From here on Serve counts the request itself."""
        self._choices.forget(pending_request.metadata.internal_request_id)

    def _view(self, replica: RunningReplica, adapter: str) -> ReplicaView:
        stats: dict[str, Any] = replica.routing_stats or {}
        load = self.replica_queue_len_cache.get(replica.replica_id)
        name = replica.replica_id.unique_id
        return ReplicaView(
            id=name,
            load=(stats.get("load", 0) if load is None else load) + self._choices.count(name),
            has_adapter=adapter in stats.get("adapters", ()),
        )
