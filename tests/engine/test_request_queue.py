import pytest

from adapters import LoRARequest
from engine.request import Request
from engine.request_queue import QueueEntry, WaitingQueue
from engine.sampling_params import SamplingParams


def make_entry(
    number: int,
    digest: str | None = None,
    *,
    tenant: str = "",
    priority: int = 0,
    rank: int = 1,
    at: float = 0.0,
) -> QueueEntry:
    lora = None
    if digest is not None:
        lora = LoRARequest(lora_name="adapter", lora_path="-", digest=digest)
    request = Request(
        request_id=str(number),
        prompt_token_ids=[0],
        params=SamplingParams(),
        lora=lora,
        tenant=tenant,
    )
    return QueueEntry(priority, rank, at, number, request)


def make_queue(*entries: QueueEntry) -> WaitingQueue:
    queue = WaitingQueue()
    for entry in entries:
        queue.push(entry)
    return queue


def admit_next(queue: WaitingQueue) -> int:
    """Serve the first request, as if there were room for one at a time."""
    entry = queue.walk(near=frozenset()).next()
    assert entry is not None
    queue.admit(entry)
    return entry.number


def walk_numbers(queue: WaitingQueue) -> list[int]:
    """Serve all requests in one walk."""
    walk = queue.walk(near=frozenset())
    numbers = []
    while (entry := walk.next()) is not None:
        numbers.append(entry.number)
        queue.admit(entry)
        walk.revisit(entry)
    assert len(queue) == 0
    return numbers


def test_order_is_priority_then_preempted_by_arrival_then_turns_of_adapters() -> None:
    entries = [
        make_entry(1, at=2.0),
        make_entry(2, "a", at=1.0),
        make_entry(3, at=1.0),
        make_entry(4, "b", at=9.0, rank=0),
        make_entry(5, "a", at=9.0, priority=-1),
        make_entry(6, "c", at=8.0, rank=0),
        make_entry(7, "a", at=3.0),
    ]
    # The base model comes first to the queue; the adapter has had a turn by its urgent request.
    assert walk_numbers(make_queue(*entries)) == [5, 6, 4, 3, 2, 1, 7]
    queue = make_queue(*entries)
    assert [admit_next(queue) for _ in entries] == [5, 6, 4, 3, 2, 1, 7]


@pytest.mark.parametrize("in_one_walk", [True, False])
def test_adapters_take_turns_however_many_requests_each_has(in_one_walk: bool) -> None:
    queue = make_queue(*(make_entry(i, "flood") for i in range(200)))
    assert [admit_next(queue) for _ in range(3)] == [0, 1, 2]
    for number in (1000, 1001):
        queue.push(make_entry(number, "late"))
    queue.push(make_entry(2000, "later"))
    order = walk_numbers(queue) if in_one_walk else [admit_next(queue) for _ in range(len(queue))]
    assert order[:6] == [3, 1000, 2000, 4, 1001, 5]
    assert order[6:] == list(range(6, 200))


def test_tenants_take_turns_however_many_adapters_each_asks_for() -> None:
    queue = make_queue(*(make_entry(i, f"a{i}", tenant="many") for i in range(50)))
    for number in (100, 101):
        queue.push(make_entry(number, "a0", tenant="one"))
    order = walk_numbers(queue)
    assert order[:5] == [0, 100, 1, 101, 2]
    assert order[5:] == list(range(3, 50))


def test_newcomers_never_starve_a_flow_that_waits() -> None:
    queue = make_queue(*(make_entry(i, "patient") for i in range(10)))
    served: list[int] = []
    for number in range(100, 500, 2):
        # Two newcomers for each that is served: more come than can be served.
        queue.push(make_entry(number, f"new{number}", tenant=f"t{number}"))
        queue.push(make_entry(number + 1, f"new{number}", tenant=f"t{number + 1}"))
        served.append(admit_next(queue))
    turns = [served.index(i) for i in range(5)]
    assert turns == sorted(turns), "with its own requests in order"


def test_aborted_requests_cost_their_tenant_no_turns() -> None:
    gone = [make_entry(i, f"a{i}", tenant="unlucky") for i in range(100)]
    queue = make_queue(*gone)
    for entry in gone:
        queue.remove(entry)
    assert len(queue) == 0 and "a0" not in queue
    for number in range(200, 210):
        queue.push(make_entry(number, "x", tenant="other"))
    queue.push(make_entry(300, "a0", tenant="unlucky"))
    assert walk_numbers(queue)[:3] == [200, 300, 201]


def test_preempted_request_returns_without_costing_a_turn() -> None:
    queue = make_queue(make_entry(1, "a"), make_entry(2, "a"), make_entry(3, "b"))
    first = queue.walk(near=frozenset()).next()
    assert first is not None
    queue.admit(first)
    queue.push(first._replace(rank=0))
    assert walk_numbers(queue) == [1, 3, 2]


def test_walk_shows_one_request_per_flow_unless_revisited() -> None:
    queue = make_queue(make_entry(1, "a"), make_entry(2, "a"), make_entry(3))
    walk = queue.walk(near={"a"})
    first = walk.next()
    assert first is not None and first.number == 1
    second = walk.next()
    assert second is not None and second.number == 3
    assert walk.next() is None


def test_skipping_far_adapters_leaves_the_near_ones() -> None:
    queue = make_queue(make_entry(1, "far"), make_entry(2, "near"), make_entry(3))
    walk = queue.walk(near={None, "near"})
    walk.skip_far()
    entries = [walk.next(), walk.next(), walk.next()]
    assert [entry and entry.number for entry in entries] == [2, 3, None]


def test_removing_from_the_middle_keeps_the_rest() -> None:
    middle = make_entry(2, "a")
    queue = make_queue(make_entry(1, "a"), middle, make_entry(3, "a"))
    queue.remove(middle)
    assert len(queue) == 2
    assert walk_numbers(queue) == [1, 3]
    assert "a" not in queue


def test_first_of_each_adapter_in_order() -> None:
    queue = make_queue(
        make_entry(1, "c"),
        make_entry(2, "a"),
        make_entry(3, "b"),
        make_entry(4, "a", priority=-1),
        make_entry(5, "b", tenant="other"),
    )
    heads = queue.first_of_each(limit=2, excluding={"c"})
    assert [head.number for head in heads] == [4, 5]
