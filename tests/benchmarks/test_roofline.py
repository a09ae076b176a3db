"""The roofline counts what a model really has, and is committed as it is computed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.roofline import (
    DEVICES,
    LLAMA_8B,
    RANKS,
    Workload,
    base_ops,
    lora_ops,
    op_table,
    predict,
    predictions,
    ratio_table,
)

ROOT = Path(__file__).resolve().parent.parent.parent
H200 = DEVICES[-1]


def test_committed_predictions_are_those_of_the_code() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "roofline.json").read_text())
    assert committed["predictions"] == [asdict(row) for row in predictions()]


def test_tables_are_in_the_docs() -> None:
    text = (ROOT / "docs" / "performance-gpu.md").read_text()
    for targets in ("all linears", "q and v"):
        assert ratio_table(predictions(), H200.name, 16, targets) in text
    assert op_table(Workload(32, 32, 16), H200) in text


def test_linears_read_the_weights_of_an_8b_model() -> None:
    linears = [op for op in base_ops(LLAMA_8B, Workload(1)) if op.name.startswith("linear")]
    # Llama 3 8B: 8.03e9 parameters, of which the input embedding's 0.53e9 are not multiplied.
    assert sum(op.flops for op in linears) / 2 == pytest.approx(7.50e9, rel=0.002)
    assert sum(op.num_bytes for op in linears) == pytest.approx(2 * 7.50e9, rel=0.01)


def test_adapters_read_their_own_weights_once_each() -> None:
    one = sum(op.num_bytes for op in lora_ops(LLAMA_8B, Workload(64, 1, 16)))
    eight = sum(op.num_bytes for op in lora_ops(LLAMA_8B, Workload(64, 8, 16)))
    # Rank 16 on all linears of the 8B model is 41.9 million parameters.
    assert (eight - one) / 7 == pytest.approx(2 * 41.94e6, rel=0.001)
    assert [*lora_ops(LLAMA_8B, Workload(64))] == []


def test_more_adapters_than_sequences_cost_no_more() -> None:
    few, many = (predict(LLAMA_8B, Workload(4, count, 16), H200) for count in (4, 64))
    assert few.lora_s == many.lora_s


@pytest.mark.parametrize("batch", [1, 32, 256])
def test_overhead_grows_with_rank_and_never_below_nothing(batch: int) -> None:
    ratios = [predict(LLAMA_8B, Workload(batch, 8, rank), H200).ratio_to_base for rank in RANKS]
    assert ratios == sorted(ratios, reverse=True)
    assert 0 < ratios[-1] < ratios[0] < 1


def test_an_op_takes_the_longer_of_moving_and_computing() -> None:
    linear = next(op for op in base_ops(LLAMA_8B, Workload(1)) if op.name == "linear down")
    assert linear.seconds(H200, 0.0) == linear.num_bytes / H200.bytes_per_s
    linear = next(op for op in base_ops(LLAMA_8B, Workload(4096)) if op.name == "linear down")
    assert linear.seconds(H200, 0.0) == linear.flops / H200.flops_per_s
    assert linear.seconds(H200, 1e-6) == pytest.approx(linear.seconds(H200, 0.0) + 32e-6)
