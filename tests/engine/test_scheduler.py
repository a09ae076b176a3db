"""What one step contains: budget, order, chunks, prefix cache, preemption, exits."""

import pytest

from adapters import LoRARequest
from engine.cache.block_table import KVCacheManager
from engine.config import SchedulerConfig
from engine.errors import QueueFullError
from engine.lora.slots import SlotManager
from engine.outputs import SchedulerOutput
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    *,
    digest: str | None = None,
    priority: int = 0,
    arrival_s: float = 0.0,
    first_token: int = 0,
) -> Request:
    lora = None
    if digest is not None:
        lora = LoRARequest(lora_name="adapter", lora_path="-", digest=digest)
    return Request(
        request_id=request_id,
        prompt_token_ids=[first_token + i for i in range(num_prompt_tokens)],
        params=SamplingParams(),
        lora=lora,
        priority=priority,
        arrival_s=arrival_s,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    budget: int = 16,
    max_waiting: int = 100,
    max_model_len: int = 64,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_waiting=max_waiting
        ),
        KVCacheManager(num_blocks=num_blocks, block_size=4),
        SlotManager(max_loras=2),
        max_model_len=max_model_len,
        adapter_ready=lambda request: True,
        clock=lambda: 0.0,
    )


def run_step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    sampled = {item.request.key: token for item in output.scheduled if item.samples}
    scheduler.update_after_step(output, sampled)
    return output


def shares(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_tokens) for item in output.scheduled]


def test_prompt_is_computed_in_one_step_and_then_one_token_each() -> None:
    scheduler = make_scheduler()
    request = make_request("r", 5)
    scheduler.add(request)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
    (first,) = run_step(scheduler).scheduled
    assert (first.num_tokens, first.num_computed_tokens, first.samples) == (5, 0, True)
    assert request.output_token_ids == [7]
    (second,) = run_step(scheduler).scheduled
    assert (second.num_tokens, second.num_computed_tokens, second.samples) == (1, 5, True)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)


def test_long_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    scheduler = make_scheduler(budget=4)
    request = make_request("r", 10)
    scheduler.add(request)
    steps = [run_step(scheduler).scheduled[0] for _ in range(4)]
    assert [item.num_tokens for item in steps] == [4, 4, 2, 1]
    assert [item.samples for item in steps] == [False, False, True, True]
    assert len(request.output_token_ids) == 2


def test_decodes_come_before_prefills_in_budget_and_in_the_batch() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("long", 30, arrival_s=0.0, first_token=100))
    scheduler.add(make_request("short", 3, arrival_s=1.0))
    while scheduler.num_running < 2:
        run_step(scheduler)
    scheduler.add(make_request("next", 30, arrival_s=2.0, first_token=200))
    assert shares(run_step(scheduler)) == [("long", 1), ("short", 1), ("next", 6)]
    assert shares(run_step(scheduler)) == [("long", 1), ("short", 1), ("next", 6)]


def test_single_token_chunk_is_placed_with_the_decodes() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("a", 3, arrival_s=0.0))
    scheduler.add(make_request("b", 3, arrival_s=1.0, first_token=50))
    assert shares(run_step(scheduler)) == [("b", 1), ("a", 3)]


def test_requests_of_one_adapter_are_side_by_side() -> None:
    scheduler = make_scheduler()
    for index, digest in enumerate(["x", None, "y", "x", None, "y"]):
        scheduler.add(make_request(str(index), 1, digest=digest, arrival_s=float(index)))
    assert [item.slot for item in run_step(scheduler).scheduled] == [None, None, 0, 0, 1, 1]


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("late", 1, arrival_s=2.0))
    scheduler.add(make_request("early", 1, arrival_s=1.0))
    scheduler.add(make_request("urgent", 1, priority=-1, arrival_s=3.0))
    order = []
    while scheduler.has_work:
        (item,) = run_step(scheduler).scheduled
        order.append(item.request.request_id)
        scheduler.finish(item.request)
    assert order == ["urgent", "early", "late"]


def test_at_most_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for index in range(3):
        scheduler.add(make_request(str(index), 1))
    assert len(run_step(scheduler).scheduled) == 2
    assert scheduler.num_waiting == 1


def test_budget_of_one_token_serves_everyone() -> None:
    scheduler = make_scheduler(budget=1)
    requests = [make_request(str(i), 6, arrival_s=float(i)) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(100):
        for item in run_step(scheduler).scheduled:
            if len(item.request.output_token_ids) == 3:
                scheduler.finish(item.request)
    assert [len(request.output_token_ids) for request in requests] == [3, 3, 3]
    assert not scheduler.has_work


def test_prefix_of_an_earlier_request_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    first = make_request("1", 10)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.finish(first)
    second = make_request("2", 10)
    scheduler.add(second)
    (item,) = run_step(scheduler).scheduled
    assert (item.num_computed_tokens, item.num_tokens) == (8, 2)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_last_running_request_gives_way_when_blocks_run_out() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    first, last = make_request("first", 7), make_request("last", 7, first_token=50, arrival_s=1.0)
    scheduler.add(last)
    scheduler.add(first)
    run_step(scheduler)
    run_step(scheduler)
    output = run_step(scheduler)
    assert output.preempted == (last,)
    assert shares(output) == [("first", 1)]
    assert (last.status, last.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert last.output_token_ids == [7, 7]
    assert scheduler.num_waiting == 1


def test_lowest_priority_gives_way_even_to_a_later_arrival() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    urgent = make_request("urgent", 7, priority=-1, arrival_s=1.0)
    normal = make_request("normal", 7, first_token=50, arrival_s=0.0)
    scheduler.add(normal)
    scheduler.add(urgent)
    run_step(scheduler)
    run_step(scheduler)
    assert run_step(scheduler).preempted == (normal,)


def test_preempted_request_computes_prompt_and_output_again_before_newer_ones() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    first, last = make_request("first", 7), make_request("last", 7, first_token=50, arrival_s=1.0)
    scheduler.add(first)
    scheduler.add(last)
    for _ in range(3):
        run_step(scheduler)
    scheduler.add(make_request("new", 1, arrival_s=0.5))
    assert shares(run_step(scheduler)) == [("first", 1)], "the small one does not overtake"
    scheduler.finish(first)
    output = run_step(scheduler)
    # The block of four prompt tokens was still cached; then come 3 prompt and 2 output tokens.
    assert [(i.request.request_id, i.num_computed_tokens) for i in output.scheduled] == [
        ("new", 0),
        ("last", 4),
    ]
    assert shares(output) == [("new", 1), ("last", 5)]
    assert last.output_token_ids == [7, 7, 7]
    assert last.num_cached_tokens == 0, "counted at the first admission only"


def test_two_requests_that_do_not_fit_together_both_end() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, budget=3)
    requests = [make_request(str(i), 6, first_token=50 * i, arrival_s=float(i)) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(200):
        for item in run_step(scheduler).scheduled:
            if item.request.num_tokens == 16:
                scheduler.finish(item.request)
    assert [request.num_tokens for request in requests] == [16, 16, 16]


def test_request_that_waits_for_blocks_is_not_overtaken_by_smaller_ones() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    first = make_request("first", 7)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(make_request("large", 12, first_token=50, arrival_s=1.0))
    scheduler.add(make_request("small", 1, digest="x", arrival_s=2.0))
    assert shares(run_step(scheduler)) == [("first", 1)]
    scheduler.finish(first)
    assert shares(run_step(scheduler)) == [("small", 1), ("large", 12)]


def test_pool_must_hold_the_longest_request() -> None:
    with pytest.raises(ValueError, match="5 blocks are needed"):
        make_scheduler(num_blocks=4, max_model_len=17)


def test_aborted_requests_give_everything_back() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_request("1", 5, digest="x"), make_request("2", 5, digest="y")
    scheduler.add(running)
    scheduler.add(waiting)
    output = scheduler.schedule()
    assert scheduler.abort(("1", 0)) is running
    assert scheduler.abort(("2", 0)) is waiting
    assert scheduler.abort(("2", 0)) is None
    scheduler.update_after_step(output, {("1", 0): 7})
    assert running.output_token_ids == []
    assert running.status is RequestStatus.FINISHED
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert not scheduler.has_work
    assert scheduler.schedule().scheduled == ()


def test_aborted_waiting_request_lends_no_prefix_to_a_later_one_of_its_key() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    first = make_request("first", 9)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(make_request("r", 14))
    assert shares(run_step(scheduler)) == [("first", 1)], "too long to start beside the first"
    scheduler.abort(("r", 0))
    scheduler.finish(first)
    scheduler.add(make_request("r", 9, first_token=50))
    assert shares(run_step(scheduler)) == [("r", 9)]


def test_finishing_twice_spares_a_later_request_of_the_same_key() -> None:
    scheduler = make_scheduler()
    first, second = make_request("r", 5), make_request("r", 5)
    scheduler.add(first)
    scheduler.finish(first)
    scheduler.add(second)
    scheduler.finish(first)
    assert scheduler.num_waiting == 1


def test_requests_that_could_never_run_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r", 1))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(make_request("r", 1))
    with pytest.raises(ValueError, match="65 tokens"):
        scheduler.add(make_request("long", 65))
    with pytest.raises(ValueError, match="0 tokens"):
        scheduler.add(make_request("empty", 0))
    nameless = make_request("nameless", 1)
    nameless.lora = LoRARequest(lora_name="adapter", lora_path="-")
    with pytest.raises(ValueError, match="without its digest"):
        scheduler.add(nameless)
    assert scheduler.num_waiting == 1


def test_adapter_request_is_refused_without_slots() -> None:
    scheduler = Scheduler(
        SchedulerConfig(),
        KVCacheManager(num_blocks=1, block_size=4),
        None,
        max_model_len=4,
        adapter_ready=lambda request: True,
    )
    with pytest.raises(ValueError, match="no slots"):
        scheduler.add(make_request("r", 1, digest="x"))
    scheduler.add(make_request("base", 1))
    assert shares(run_step(scheduler)) == [("base", 1)]


def test_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_waiting=1)
    scheduler.add(make_request("1", 1))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("2", 1))
    run_step(scheduler)
    scheduler.add(make_request("2", 1))
