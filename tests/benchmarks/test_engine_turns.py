"""What the engine benchmark makes of its turns: ratios within a turn, medians over them."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest

from adapters import LoRARequest
from benchmarks.engine import medians, run_turns
from benchmarks.engine_under_test import Measured, Traffic
from benchmarks.floor import Floor


def test_the_first_turn_does_not_count_and_floors_are_of_each_turn() -> None:
    calls: list[str] = []

    def case(name: str) -> Callable[[], Measured]:
        def run() -> Measured:
            calls.append(name)
            return Measured(float(len(calls)), 0.1, 0.2, 0.3)

        return run

    cases = {"one": case("one"), "two": case("two")}
    turns = run_turns(cases, 2, {"two": Floor(1 << 20, 0)}, threads=1)
    assert calls == ["one", "two"] * 3
    assert [turn.figures["one"]["tokens_per_s"] for turn in turns] == [3.0, 5.0]
    assert all(turn.floors.keys() == {"two"} and turn.floors["two"] > 0 for turn in turns)


def test_a_slow_turn_moves_no_ratio_of_the_others() -> None:
    ratios = [{"a": 0.9}, {"a": 0.2}, {"a": 0.95}]
    assert medians(ratios) == {"a": 0.9}


def test_traffic_follows_zipf() -> None:
    loras = [LoRARequest(lora_name=str(i), lora_path="", digest=str(i)) for i in range(1000)]
    wanted = islice(Traffic(loras).requests(random.Random(0)), 20_000)
    counts = Counter(lora.lora_name for _, lora in wanted if lora is not None)
    # The first of 1,000 has a share of 1 / 7.49, the second half of that.
    assert counts["0"] / 20_000 == pytest.approx(0.1336, abs=0.01)
    assert counts["0"] / counts["1"] == pytest.approx(2.0, rel=0.15)


def test_traffic_without_adapters_is_the_base_models() -> None:
    requests = islice(Traffic([]).requests(random.Random(0)), 5)
    assert [lora for _, lora in requests] == [None] * 5
