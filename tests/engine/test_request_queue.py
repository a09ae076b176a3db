from adapters import LoRARequest
from engine.request import Request
from engine.request_queue import QueueEntry, WaitingQueue
from engine.sampling_params import SamplingParams


def make_entry(
    number: int, digest: str | None = None, *, priority: int = 0, rank: int = 1, at: float = 0.0
) -> QueueEntry:
    lora = None
    if digest is not None:
        lora = LoRARequest(lora_name="adapter", lora_path="-", digest=digest)
    request = Request(
        request_id=str(number), prompt_token_ids=[0], params=SamplingParams(), lora=lora
    )
    return QueueEntry(priority, rank, at, number, request)


def make_queue(*entries: QueueEntry) -> WaitingQueue:
    queue = WaitingQueue()
    for entry in entries:
        queue.push(entry)
    return queue


def walk_numbers(queue: WaitingQueue) -> list[int]:
    walk = queue.walk(near=frozenset())
    numbers = []
    while (entry := walk.next()) is not None:
        numbers.append(entry.number)
        queue.remove(entry)
        walk.revisit(entry.request.digest)
    return numbers


def test_order_is_priority_then_preempted_then_arrival_then_number() -> None:
    queue = make_queue(
        make_entry(1, at=2.0),
        make_entry(2, "a", at=1.0),
        make_entry(3, at=1.0),
        make_entry(4, "b", at=9.0, rank=0),
        make_entry(5, "a", at=9.0, priority=-1),
    )
    assert walk_numbers(queue) == [5, 4, 2, 3, 1]
    assert len(queue) == 0


def test_walk_shows_one_request_per_adapter_unless_revisited() -> None:
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
        make_entry(1, "c"), make_entry(2, "a"), make_entry(3, "b"), make_entry(4, "a", priority=-1)
    )
    heads = queue.first_of_each(limit=2, excluding={"c"})
    assert [head.number for head in heads] == [4, 3]
