"""Decides which requests run in the next step, and with how many tokens each.

Knows requests, budgets, block tables and adapter slots. Knows nothing of tensors, of text or of why
a request ends.

A step shares ``max_num_batched_tokens`` out: first one token for each running request that decodes,
then the running requests' unfinished prefills in chunks, then waiting requests. A request is
admitted only when blocks for all its known tokens are free, and takes them at once; so only
decoding can run out of blocks. Then the last running request (lowest priority, latest arrival)
gives way: it loses its blocks, waits at the front of its priority and computes its tokens again.
Since running requests are served in the same order, a request that gives way is never one that
already has a place in the step, and the first running request always gets on.

``engine.lora.slot_gate`` says who may overtake a request that waits for a slot, and how long.
"""

import time
from bisect import insort
from collections.abc import Callable, Mapping

from adapters import LoRARequest
from engine.cache.block_table import KVCacheManager
from engine.config import SchedulerConfig
from engine.deadlines import Deadlines
from engine.errors import QueueFullError
from engine.lora.slot_gate import SlotGate
from engine.lora.slots import SlotManager
from engine.outputs import ScheduledRequest, SchedulerOutput, SlotLoad
from engine.request import Request, RequestStatus
from engine.request_queue import QueueEntry, WaitingQueue, remove_entry

RequestKey = tuple[str, int]


class _Step:
    """The step that is being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: list[ScheduledRequest] = []
        self.slot_loads: list[SlotLoad] = []
        self.preempted: list[Request] = []

    def add(
        self, request: Request, num_remaining: int, block_ids: tuple[int, ...], slot: int | None
    ) -> None:
        """Schedule as many of the request's remaining tokens as the budget allows."""
        num_tokens = min(num_remaining, self.budget)
        self.budget -= num_tokens
        self.scheduled.append(
            ScheduledRequest(
                request=request,
                num_tokens=num_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
                slot=slot,
                samples=num_tokens == num_remaining,
            )
        )

    def output(self) -> SchedulerOutput:
        self.scheduled.sort(key=_batch_order)
        return SchedulerOutput(tuple(self.scheduled), tuple(self.slot_loads), tuple(self.preempted))


def _batch_order(item: ScheduledRequest) -> tuple[bool, int]:
    """Single tokens first; then equal slots side by side, so that LoRA segments are long."""
    return (item.num_tokens > 1, -1 if item.slot is None else item.slot)


class Scheduler:
    """The waiting and running requests of one engine. Used by one thread.

    ``adapter_ready`` says whether the weights of a request's adapter are in host memory; it is
    asked only for an adapter that is in no slot, and must be quick. ``adapter_start`` then says
    from which token on the adapter is applied.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        slots: SlotManager | None,
        *,
        max_model_len: int,
        adapter_ready: Callable[[Request], bool],
        adapter_start: Callable[[Request], int] = lambda request: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if kv.num_blocks < kv.blocks_for(max_model_len):
            raise ValueError(
                f"{kv.num_blocks} KV blocks of {kv.block_size} tokens cannot hold one request of "
                f"max_model_len {max_model_len}: {kv.blocks_for(max_model_len)} blocks are needed"
            )
        self._config = config
        self._kv = kv
        self._gate = None if slots is None else SlotGate(slots, config.max_adapter_wait_s)
        self._max_model_len = max_model_len
        self._adapter_ready = adapter_ready
        self._adapter_start = adapter_start
        self._clock = clock
        self._num_added = 0
        self._waiting = WaitingQueue()
        self._running: list[QueueEntry] = []
        self._entries: dict[RequestKey, QueueEntry] = {}
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        return bool(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not running, those preempted included."""
        return len(self._waiting)

    @property
    def next_deadline_s(self) -> float:
        """When the next request is due, by the scheduler's clock; infinity if none is."""
        return self._deadlines.next_s()

    def take_late(self) -> list[Request]:
        """Return the requests whose deadline has passed, for the caller to finish."""
        return self._deadlines.take_passed(self._clock())

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises QueueFullError beyond ``max_waiting``, ValueError for a request that this scheduler
        could never run.
        """
        self._check(request)
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already")
        self._num_added += 1
        entry = QueueEntry(request.priority, 1, request.arrival_s, self._num_added, request)
        self._entries[request.key] = entry
        self._waiting.push(entry)
        self._deadlines.add(request)
        request.status = RequestStatus.WAITING

    def abort(self, key: RequestKey) -> Request | None:
        """Finish the request with this key, if there is one, and return it."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.finish(entry.request)
        return entry.request

    def finish(self, request: Request) -> None:
        """Give up everything the request holds. Does nothing for one that is not known."""
        entry = self._entries.get(request.key)
        if entry is None or entry.request is not request:
            return
        if request.status is RequestStatus.RUNNING:
            remove_entry(self._running, entry)
            self._release(request)
        else:
            self._waiting.remove(entry)
            self._left_waiting(entry)
            self._kv.free(request)
        del self._entries[request.key]
        request.status = RequestStatus.FINISHED

    def upcoming_adapters(self, limit: int) -> list[LoRARequest]:
        """Name the adapters in no slot that waiting requests need, the first needed first.

        For whoever loads weights into host memory ahead of time.
        """
        heads = self._waiting.first_of_each(limit=limit, excluding=self._resident())
        return [head.request.lora for head in heads if head.request.lora is not None]

    def schedule(self) -> SchedulerOutput:
        """Choose the next step. Empty when every request waits for its adapter's weights."""
        step = _Step(self._config.max_num_batched_tokens)
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        if not step.preempted:
            self._admit(step)
        return step.output()

    def update_after_step(self, output: SchedulerOutput, sampled: Mapping[RequestKey, int]) -> None:
        """Record that a step has run; requests finished meanwhile are passed over."""
        for item in output.scheduled:
            request = item.request
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed_tokens = item.num_computed_tokens + item.num_tokens
            if item.samples:
                request.output_token_ids.append(sampled[request.key])
            self._kv.cache_full_blocks(request)

    def _check(self, request: Request) -> None:
        if request.key in self._entries:
            raise ValueError(f"request {request.key} is being served already")
        if not 0 < request.num_tokens <= self._max_model_len:
            raise ValueError(
                f"request {request.key} has {request.num_tokens} tokens, the model takes 1 to "
                f"{self._max_model_len}"
            )
        if request.lora is not None and request.digest is None:
            # Without a digest it would run on the base model.
            raise ValueError(f"request {request.key} names an adapter without its digest")
        if request.lora is not None and self._gate is None:
            raise ValueError(f"request {request.key} names an adapter, but there are no slots")

    def _schedule_decodes(self, step: _Step) -> None:
        index = 0
        while index < len(self._running) and step.budget:
            request = self._running[index].request
            if request.num_tokens - request.num_computed_tokens == 1:
                if not self._make_room(request, step):
                    return
                self._place(request, 1, step)
            index += 1

    def _schedule_prefills(self, step: _Step) -> None:
        for entry in self._running:
            if not step.budget:
                return
            num_remaining = entry.request.num_tokens - entry.request.num_computed_tokens
            if num_remaining > 1:
                self._place(entry.request, num_remaining, step)

    def _place(self, request: Request, num_remaining: int, step: _Step) -> None:
        slot = None
        digest = request.digest
        if self._gate is not None and digest is not None:
            slot = self._gate.slots.slot_of(digest)
            assert slot is not None, "a running request holds its adapter's slot"
        step.add(request, num_remaining, self._kv.block_ids(request), slot)

    def _make_room(self, request: Request, step: _Step) -> bool:
        """Find a block for the next token; False when the request itself had to give way."""
        assert request.num_computed_tokens < self._max_model_len, "a full request must be finished"
        while not self._kv.allocate_slots(request, 1):
            last = self._running.pop()
            self._preempt(last)
            step.preempted.append(last.request)
            if last.request is request:
                return False
        return True

    def _preempt(self, entry: QueueEntry) -> None:
        request = entry.request
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._waiting.push(entry)

    def _admit(self, step: _Step) -> None:
        if not (len(self._waiting) and self._has_room(step)):
            return
        if self._gate is not None:
            self._gate.begin(self._clock())
        walk = self._waiting.walk(near=self._resident() | {None})
        refused: set[str | None] = set()
        while self._has_room(step) and (entry := walk.next()) is not None:
            digest = entry.request.digest
            if digest in refused:
                continue
            if not self._adapter_admits(entry.request):
                refused.add(digest)
                if self._gate is not None and self._gate.is_exhausted:
                    walk.skip_far()
                continue
            if not self._start(entry, step):
                # Later, smaller requests must not keep taking the blocks this one waits for.
                return
            walk.revisit(entry)

    def _has_room(self, step: _Step) -> bool:
        return step.budget > 0 and len(self._running) < self._config.max_num_seqs

    def _adapter_admits(self, request: Request) -> bool:
        if self._gate is None or request.digest is None:
            return True
        is_resident = self._gate.slots.slot_of(request.digest) is not None
        if not is_resident and not self._adapter_ready(request):
            return False
        return self._gate.admits(request.digest)

    def _start(self, entry: QueueEntry, step: _Step) -> bool:
        """Move a waiting request to the running ones, unless blocks are short."""
        request = entry.request
        if request.digest is not None:
            request.adapter_start = self._adapter_start(request)
        cached = self._kv.find_cached(request)
        num_cached = len(cached) * self._kv.block_size
        if not self._kv.allocate_slots(request, request.num_tokens - num_cached, cached):
            return False
        request.num_computed_tokens = num_cached
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
            request.scheduled_s = self._clock()
        self._waiting.admit(entry)
        self._left_waiting(entry)
        # Among running requests only priority and arrival count.
        entry = entry._replace(rank=0)
        self._entries[request.key] = entry
        insort(self._running, entry)
        request.status = RequestStatus.RUNNING
        if self._gate is not None and request.digest is not None:
            activation = self._gate.acquire(request.digest)
            if activation.is_new:
                step.slot_loads.append(SlotLoad(activation.slot, request.digest))
        self._place(request, request.num_tokens - num_cached, step)
        return True

    def _left_waiting(self, entry: QueueEntry) -> None:
        digest = entry.request.digest
        if self._gate is not None and digest is not None and digest not in self._waiting:
            self._gate.forget(digest)

    def _release(self, request: Request) -> None:
        self._kv.free(request)
        if self._gate is not None and request.digest is not None:
            self._gate.release(request.digest)

    def _resident(self) -> set[str | None]:
        if self._gate is None:
            return set()
        return {residency.digest for residency in self._gate.slots.resident()}
