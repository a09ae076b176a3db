"""Which adapters' requests a step admits: readiness, slots, overtaking, turns."""

import math
from collections import Counter

from adapters import LoRARequest
from engine.cache.block_table import KVCacheManager
from engine.config import SchedulerConfig
from engine.lora.slots import SlotManager
from engine.outputs import SchedulerOutput, SlotLoad
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

WAIT_S = 10.0


class Server:
    """A scheduler with slots and a clock; a request ends after ``max_tokens`` tokens."""

    def __init__(self, *, max_loras: int = 1, max_num_seqs: int = 8, num_blocks: int = 64) -> None:
        self.now = 0.0
        self.not_ready: set[str] = set()
        self.asked: list[str | None] = []
        self.num_added = 0
        self.slots = SlotManager(max_loras)
        self.kv = KVCacheManager(num_blocks=num_blocks, block_size=4)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_adapter_wait_s=WAIT_S),
            self.kv,
            self.slots,
            max_model_len=16,
            adapter_ready=self._is_ready,
            clock=lambda: self.now,
        )

    def _is_ready(self, request: Request) -> bool:
        self.asked.append(request.digest)
        return request.digest not in self.not_ready

    def add(
        self,
        digest: str | None,
        *,
        max_tokens: int = 16,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float = math.inf,
    ) -> Request:
        self.num_added += 1
        lora = None
        if digest is not None:
            lora = LoRARequest(lora_name=digest, lora_path="-", digest=digest)
        request = Request(
            request_id=str(self.num_added),
            prompt_token_ids=[self.num_added],
            params=SamplingParams(max_tokens=max_tokens),
            lora=lora,
            priority=priority,
            arrival_s=self.now,
            tenant=tenant,
            deadline_s=deadline_s,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        sampled = {item.request.key: 0 for item in output.scheduled if item.samples}
        self.scheduler.update_after_step(output, sampled)
        for item in output.scheduled:
            if len(item.request.output_token_ids) == item.request.params.max_tokens:
                self.scheduler.finish(item.request)
        return output

    def running(self) -> Counter[str | None]:
        """Take a step and count its requests by adapter."""
        return Counter(item.request.digest for item in self.step().scheduled)


def test_adapter_is_loaded_once_into_its_slot() -> None:
    server = Server(max_loras=2)
    server.add("x")
    server.add("x")
    server.add("y")
    output = server.step()
    assert output.slot_loads == (SlotLoad(0, "x"), SlotLoad(1, "y"))
    assert server.step().slot_loads == ()
    assert server.slots.num_refs("x") == 2


def test_request_whose_adapter_is_not_ready_blocks_nobody() -> None:
    server = Server()
    server.not_ready.add("x")
    server.add("x")
    assert server.step().scheduled == ()
    assert server.scheduler.has_work
    server.add("y", max_tokens=1)
    server.add(None)
    assert server.running() == {"y": 1, None: 1}
    server.not_ready.clear()
    assert server.running() == {"x": 1, None: 1}


def test_adapter_in_a_slot_needs_no_host_weights() -> None:
    server = Server()
    server.add("x", max_tokens=1)
    server.step()
    server.not_ready.add("x")
    server.asked.clear()
    server.add("x")
    assert server.running() == {"x": 1}
    assert server.asked == []


def test_slot_is_not_taken_from_a_running_request() -> None:
    server = Server()
    first = server.add("x")
    server.step()
    server.add("y")
    assert server.running() == {"x": 1}
    server.scheduler.finish(first)
    output = server.step()
    assert output.slot_loads == (SlotLoad(0, "y"),)


def test_others_overtake_a_blocked_request_for_a_limited_time() -> None:
    server = Server()
    server.add("x", max_tokens=15)
    server.step()
    server.add("y")
    server.step()
    server.now = WAIT_S - 1
    server.add("x")
    server.add(None)
    assert server.running() == {"x": 2, None: 1}
    server.now = WAIT_S
    server.add("x")
    server.add(None)
    assert server.running() == {"x": 2, None: 2}, "the base model goes on, x does not"


def test_wait_counts_from_when_a_place_was_free() -> None:
    server = Server(max_num_seqs=1)
    base = server.add(None)
    server.step()
    server.now = 5 * WAIT_S
    server.add("x", max_tokens=1)
    server.add("y")
    server.add("x")
    server.scheduler.finish(base)
    assert server.running() == {"x": 1}
    assert server.running() == {"y": 1}


def test_steady_traffic_of_one_adapter_does_not_starve_another() -> None:
    server = Server()
    server.add("x", max_tokens=8)
    server.step()
    server.add("y")
    for _ in range(60):
        server.now += 1.0
        server.add("x", max_tokens=8)
        if server.running()["y"]:
            break
    assert server.running()["y"]
    # One wait, during which x may start new requests, and the longest of their runs.
    assert server.now <= WAIT_S + 8 + 1


def test_adapters_take_turns_and_start_their_whole_queue_in_one() -> None:
    server = Server(max_loras=2)
    for _ in range(4):
        for digest in ("a", "b", "c", "d"):
            server.add(digest, max_tokens=8)
    batches = []
    while server.scheduler.has_work:
        server.now += 1.0
        batches.append(server.running())
    assert batches[0] == {"a": 4, "b": 4}
    assert {"c": 4, "d": 4} in batches
    assert len(batches) == 16


def test_every_adapter_is_served_when_there_are_many_more_than_slots() -> None:
    server = Server(max_loras=2, max_num_seqs=4)
    digests = [f"adapter-{i}" for i in range(10)]
    served: Counter[str | None] = Counter()
    for digest in digests:
        server.add(digest, max_tokens=3)
    for _ in range(400):
        server.now += 1.0
        for item in server.step().scheduled:
            request = item.request
            if len(request.output_token_ids) == 3:
                served[request.digest] += 1
                server.add(request.digest, max_tokens=3)
    assert set(served) == set(digests)
    assert max(served.values()) <= 2 * min(served.values())


def test_preempted_request_releases_its_slot() -> None:
    server = Server(max_loras=2, num_blocks=4)
    server.add("x")
    last = server.add("y")
    for _ in range(8):
        server.step()
    assert server.slots.num_refs("y") == 1
    assert server.step().preempted == (last,)
    assert server.slots.num_refs("y") == 0
    assert server.slots.num_refs("x") == 1


def test_forgotten_wait_does_not_drain_for_a_later_request() -> None:
    server = Server()
    server.add("x")
    server.step()
    gone = server.add("y")
    server.step()
    server.scheduler.abort(gone.key)
    server.now = WAIT_S
    server.add("y")
    server.add("x")
    assert server.running() == {"x": 2}


def test_upcoming_adapters_are_named_in_order_of_need() -> None:
    server = Server()
    server.add("x")
    server.step()
    server.add("a")
    server.add("b")
    server.add("x")
    server.add(None)
    server.add("c", priority=-1)
    names = [lora.lora_name for lora in server.scheduler.upcoming_adapters(limit=2)]
    assert names == ["c", "a"]


def test_a_request_starts_next_but_one_behind_two_hundred_of_another_adapter() -> None:
    server = Server(max_loras=2, max_num_seqs=1)
    for _ in range(200):
        server.add("flood", max_tokens=1)
    server.step()
    server.add("late", max_tokens=1)
    digests = [server.step().scheduled[0].request.digest for _ in range(4)]
    assert "late" in digests[:2]
    assert digests.count("flood") == 3, "nor is the flood starved"


def test_one_tenants_flood_delays_another_of_the_same_adapter_by_one_admission() -> None:
    server = Server(max_num_seqs=1)
    for _ in range(200):
        server.add("x", max_tokens=1, tenant="flood")
    server.step()
    server.add("x", max_tokens=1, tenant="other")
    tenants = [server.step().scheduled[0].request.tenant for _ in range(4)]
    assert "other" in tenants[:2]
    assert tenants.count("flood") == 3


def test_a_single_adapters_batch_stays_full() -> None:
    server = Server(max_num_seqs=8)
    for _ in range(40):
        server.add("x", max_tokens=2)
    sizes = []
    while server.scheduler.has_work:
        sizes.append(sum(server.running().values()))
    assert sizes == [8] * 10


def test_requests_past_their_deadline_are_named_once_waiting_or_running() -> None:
    server = Server(max_num_seqs=1)
    running = server.add("x", deadline_s=5.0)
    waiting = server.add("x", deadline_s=3.0)
    done = server.add("y", deadline_s=1.0)
    server.step()
    server.scheduler.abort(done.key)
    assert server.scheduler.next_deadline_s == 3.0
    server.now = 4.0
    assert server.scheduler.take_late() == [waiting]
    server.scheduler.finish(waiting)
    assert server.scheduler.take_late() == []
    server.now = 5.0
    assert server.scheduler.take_late() == [running]
    assert server.scheduler.next_deadline_s == math.inf
