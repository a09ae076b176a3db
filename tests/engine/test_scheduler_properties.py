"""Random traffic over a tiny pool, two slots and tiny budgets: what holds after every step."""

import math
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from adapters import LoRARequest
from engine.cache.block_table import KVCacheManager
from engine.config import SchedulerConfig
from engine.lora.slots import SlotManager
from engine.outputs import SchedulerOutput
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

MAX_MODEL_LEN = 20
ADAPTERS = ("a", "b", "c", "d")
WAIT_S = 3.0


class Traffic(RuleBasedStateMachine):
    """Drives a Scheduler as an engine does; a request ends after ``max_tokens`` tokens."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare_blocks=st.integers(0, 6),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        caching=st.booleans(),
    )
    def build(
        self, block_size: int, spare_blocks: int, budget: int, max_num_seqs: int, caching: bool
    ) -> None:
        num_blocks = -(-MAX_MODEL_LEN // block_size) + spare_blocks
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_adapter_wait_s=WAIT_S
        )
        self.kv = KVCacheManager(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching
        )
        self.slots = SlotManager(max_loras=2)
        self.now = 0.0
        self.unready: set[str] = set()
        self.live: dict[tuple[str, int], Request] = {}
        self.slot_weights: dict[int, str] = {}
        # What a real cache would hold: block -> the tokens whose KV was last written there.
        self.written: dict[int, dict[int, tuple[str | None, tuple[int, ...]]]] = {}
        self.num_added = 0
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            self.slots,
            max_model_len=MAX_MODEL_LEN,
            adapter_ready=lambda request: request.digest not in self.unready,
            clock=lambda: self.now,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 8),
        adapter=st.sampled_from((None, *ADAPTERS)),
        priority=st.integers(0, 1),
        prompt_logprobs=st.booleans(),
        tenant=st.sampled_from(("", "t")),
        timeout_s=st.none() | st.integers(0, 6),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        adapter: str | None,
        priority: int,
        prompt_logprobs: bool,
        tenant: str,
        timeout_s: int | None,
    ) -> None:
        self.num_added += 1
        lora = None
        if adapter is not None:
            lora = LoRARequest(lora_name=adapter, lora_path="-", digest=adapter)
        request = Request(
            request_id=str(self.num_added),
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=max_tokens, prompt_logprobs=0 if prompt_logprobs else None
            ),
            lora=lora,
            priority=priority,
            arrival_s=self.now,
            tenant=tenant,
            deadline_s=math.inf if timeout_s is None else self.now + timeout_s,
        )
        self.scheduler.add(request)
        self.live[request.key] = request

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(key) is self.live.pop(key)
        assert self.scheduler.abort(key) is None

    @rule(adapter=st.sampled_from(ADAPTERS))
    def lose_host_weights(self, adapter: str) -> None:
        self.unready.add(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def load_host_weights(self, adapter: str) -> None:
        self.unready.discard(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def drop_prefixes(self, adapter: str) -> None:
        self.kv.drop_adapter(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def pin_one(self, adapter: str) -> None:
        for other in ADAPTERS:
            self.slots.unpin(other)
        self.slots.pin(adapter)

    @rule(token=st.integers(0, 1), data=st.data())
    def step(self, token: int, data: st.DataObject) -> None:
        for late in self.scheduler.take_late():
            assert late.deadline_s <= self.now
            self.scheduler.finish(self.live.pop(late.key))
        assert all(request.deadline_s > self.now for request in self.live.values())
        output = self.scheduler.schedule()
        self.check_output(output)
        if self.live and data.draw(st.integers(0, 5)) == 0:
            self.abort(data)
        self.finish_step(output, token)

    def finish_step(self, output: SchedulerOutput, token: int) -> None:
        self.now += 1.0
        sampled = {item.request.key: token for item in output.scheduled if item.samples}
        self.scheduler.update_after_step(output, sampled)
        for item in output.scheduled:
            request = item.request
            done = len(request.output_token_ids) == request.params.max_tokens
            if request.key in self.live and (done or request.num_tokens >= MAX_MODEL_LEN):
                self.scheduler.finish(request)
                self.scheduler.finish(request)
                del self.live[request.key]

    def check_output(self, output: SchedulerOutput) -> None:
        for load in output.slot_loads:
            self.slot_weights[load.slot] = load.digest
        requests = [item.request for item in output.scheduled]
        assert len(requests) == len({request.key for request in requests})
        assert output.num_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        sizes = [item.num_tokens for item in output.scheduled]
        assert all(size > 0 for size in sizes)
        assert sorted(sizes, key=lambda size: size > 1) == sizes
        assert not {r.key for r in output.preempted} & {r.key for r in requests}
        if self.scheduler.num_running:
            assert output.scheduled, "running requests get on"
        for item in output.scheduled:
            request = item.request
            assert request.status is RequestStatus.RUNNING
            end = item.num_computed_tokens + item.num_tokens
            assert item.samples == (end == request.num_tokens)
            assert len(item.block_ids) * self.kv.block_size >= end
            if request.digest is None:
                assert item.slot is None
            else:
                assert item.slot is not None
                assert self.slot_weights[item.slot] == request.digest
        self.check_memory(output)

    def check_memory(self, output: SchedulerOutput) -> None:
        """Write each token's whole history where its KV would be, and read back every context."""
        size = self.kv.block_size
        for item in output.scheduled:
            request = item.request
            for position in range(
                item.num_computed_tokens, item.num_computed_tokens + item.num_tokens
            ):
                history = (request.digest, tuple(request.token_slice(0, position + 1)))
                block = self.written.setdefault(item.block_ids[position // size], {})
                block[position % size] = history
        for item in output.scheduled:
            request = item.request
            for position in range(item.num_computed_tokens + item.num_tokens):
                history = (request.digest, tuple(request.token_slice(0, position + 1)))
                assert self.written[item.block_ids[position // size]][position % size] == history

    @invariant()
    def blocks_are_counted_and_shared_only_when_equal(self) -> None:
        users: dict[int, list[tuple[Request, int]]] = {}
        for request in self.live.values():
            table = self.kv.block_ids(request)
            assert len(table) == len(set(table))
            assert request.status is RequestStatus.RUNNING or not table
            for index, block_id in enumerate(table):
                users.setdefault(block_id, []).append((request, index))
        pool = self.kv.pool
        for block_id in range(pool.num_blocks):
            assert pool.num_refs(block_id) == len(users.get(block_id, ()))
        assert pool.num_free_blocks == pool.num_blocks - len(users)
        for sharing in users.values():
            contents = {
                (request.digest, tuple(request.token_slice(0, (index + 1) * self.kv.block_size)))
                for request, index in sharing
            }
            assert len(contents) == 1
            if len(sharing) > 1:
                assert all(
                    request.num_computed_tokens >= (index + 1) * self.kv.block_size
                    for request, index in sharing
                )

    @invariant()
    def slot_references_match_running_requests(self) -> None:
        running = [r for r in self.live.values() if r.status is RequestStatus.RUNNING]
        assert self.scheduler.num_running == len(running)
        assert self.scheduler.num_waiting == len(self.live) - len(running)
        expected = Counter(r.digest for r in running if r.digest is not None)
        residents = self.slots.resident()
        assert len({r.slot for r in residents}) == len(residents) <= self.slots.max_loras
        assert {r.digest: r.num_refs for r in residents if r.num_refs} == dict(expected)
        assert self.slots.num_in_use == len(expected)

    def teardown(self) -> None:
        """Whatever has been left, every request ends and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        self.unready.clear()
        num_steps = 0
        while self.scheduler.has_work:
            output = self.scheduler.schedule()
            assert output.scheduled or output.preempted
            self.check_output(output)
            self.finish_step(output, token=num_steps % 2)
            num_steps += 1
            assert num_steps < 100 * (self.num_added + 1), "a request starves"
        assert not self.live
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.slots.num_in_use == 0


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
