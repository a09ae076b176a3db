"""Requests follow their adapter, but not into a queue."""

from collections import Counter

from deployments.routing import RecentChoices, ReplicaView, rank_replicas


def views(*loads: int, holders: tuple[int, ...] = ()) -> list[ReplicaView]:
    return [ReplicaView(f"r{i}", load, i in holders) for i, load in enumerate(loads)]


def first(replicas: list[ReplicaView], adapter: str = "sql", spill_over: int = 4) -> str:
    (choice,) = rank_replicas(replicas, adapter, spill_over)[0]
    return choice


def test_replica_that_holds_the_adapter_comes_first() -> None:
    assert first(views(3, 0, 2, holders=(2,))) == "r2"


def test_least_loaded_holder_comes_first() -> None:
    assert first(views(3, 1, 2, holders=(0, 1, 2))) == "r1"


def test_busy_holder_is_passed_over() -> None:
    assert first(views(4, 0, holders=(0,))) == "r0"
    assert first(views(5, 0, holders=(0,))) == "r1"


def test_every_replica_has_a_rank() -> None:
    for adapter in ("", "sql"):
        ranks = rank_replicas(views(9, 0, 3), adapter, 0)
        assert sorted(name for rank in ranks for name in rank) == ["r0", "r1", "r2"]
    assert rank_replicas([], "sql", 0) == []
    assert rank_replicas(views(1), "", 0) == [["r0"]]


def test_unknown_adapter_always_starts_at_the_same_replica_and_adapters_spread() -> None:
    idle = views(0, 0, 0, 0)
    assert len({first(idle, "sql") for _ in range(10)}) == 1
    spread = Counter(first(idle, f"adapter-{i}") for i in range(400))
    assert len(spread) == 4
    assert min(spread.values()) > 60


def test_adapters_stay_where_they_are_when_a_replica_is_added() -> None:
    names = [f"adapter-{i}" for i in range(400)]
    moved = [n for n in names if first(views(0, 0, 0), n) != first(views(0, 0, 0, 0), n)]
    assert {first(views(0, 0, 0, 0), name) for name in moved} == {"r3"}


def test_base_model_chooses_among_two_random_replicas() -> None:
    pairs = {tuple(sorted(rank_replicas(views(0, 0, 0), "", 4)[0])) for _ in range(100)}
    assert pairs == {("r0", "r1"), ("r0", "r2"), ("r1", "r2")}


def test_choices_count_until_they_are_requests_or_old() -> None:
    now = 0.0
    choices = RecentChoices(lambda: now)
    choices.add("a", "r0")
    choices.add("b", "r0")
    assert (choices.count("r0"), choices.count("r1")) == (2, 0)
    choices.forget("a")
    assert choices.count("r0") == 1
    now = 5.0
    choices.add("c", "r1")
    assert (choices.count("r0"), choices.count("r1")) == (0, 1)
