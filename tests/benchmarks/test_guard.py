"""What the guard of the committed ratios calls a loss, and which way each ratio is better."""

import json

import pytest

from benchmarks.engine import ratios
from benchmarks.guard import COMMITTED, is_lost, losses

FIGURES = {
    "base_b1": {"tokens_per_s": 40.0, "ttft_p50_s": 0.1, "decode_step_s": 0.02},
    "base_b8": {"tokens_per_s": 200.0, "ttft_p50_s": 0.5, "decode_step_s": 0.03},
    "base_b8_lora_disabled": {"tokens_per_s": 200.0, "ttft_p50_s": 0.5, "decode_step_s": 0.03},
    "mixed8_b8": {"tokens_per_s": 180.0, "ttft_p50_s": 0.5, "decode_step_s": 0.03},
    "mixed16_b16": {"tokens_per_s": 240.0, "ttft_p50_s": 1.0, "decode_step_s": 0.05},
    "slots8_adapters16_b16": {"tokens_per_s": 180.0, "ttft_p50_s": 1.5, "decode_step_s": 0.05},
    "prefill512": {"tokens_per_s": 5.0, "ttft_p50_s": 0.2, "decode_step_s": 0.0},
    "base_traffic": {"tokens_per_s": 300.0, "ttft_p50_s": 0.4, "decode_step_s": 0.0},
    "zipf1000": {"tokens_per_s": 255.0, "ttft_p50_s": 0.5, "decode_step_s": 0.0},
}
FLOORS = {"base_b1": 0.01, "base_b8": 0.015, "prefill512": 0.13}


def with_figure(case: str, field: str, factor: float) -> dict[str, dict[str, float]]:
    figure = FIGURES[case]
    return FIGURES | {case: figure | {field: figure[field] * factor}}


def test_ratios_are_of_the_figures() -> None:
    assert ratios(FIGURES, FLOORS) == pytest.approx(
        {
            "mixed8_over_base": 0.9,
            "slots_thrash_throughput": 0.75,
            "lora_enabled_base_over_disabled": 1.0,
            "decode_step_over_floor_b1": 2.0,
            "decode_step_over_floor_b8": 2.0,
            "slots_thrash_ttft": 1.5,
            "prefill_over_matrix_rate": 0.65,
            "zipf1000_over_base": 0.85,
        }
    )


@pytest.mark.parametrize(
    ("case", "field", "factor", "ratio"),
    [
        ("mixed8_b8", "tokens_per_s", 0.7, "mixed8_over_base"),
        ("base_b8", "tokens_per_s", 0.7, "lora_enabled_base_over_disabled"),
        ("base_b1", "decode_step_s", 1.7, "decode_step_over_floor_b1"),
        ("base_b8", "decode_step_s", 1.7, "decode_step_over_floor_b8"),
        ("slots8_adapters16_b16", "ttft_p50_s", 1.3, "slots_thrash_ttft"),
        ("slots8_adapters16_b16", "tokens_per_s", 0.7, "slots_thrash_throughput"),
        ("prefill512", "ttft_p50_s", 1.3, "prefill_over_matrix_rate"),
        ("zipf1000", "tokens_per_s", 0.7, "zipf1000_over_base"),
    ],
)
def test_a_worse_figure_is_a_loss(case: str, field: str, factor: float, ratio: str) -> None:
    committed = ratios(FIGURES, FLOORS)
    slower = losses(committed, ratios(with_figure(case, field, factor), FLOORS))
    faster = losses(committed, ratios(with_figure(case, field, 1 / factor), FLOORS))
    assert is_lost(ratio, slower[ratio])
    assert faster[ratio] < 0


def test_committed_results_have_every_ratio_that_is_guarded() -> None:
    committed = json.loads(COMMITTED.read_text())["ratios"]
    assert ratios(FIGURES, FLOORS).keys() <= committed.keys()


def test_a_faster_memory_is_not_a_loss() -> None:
    committed = ratios(FIGURES, FLOORS)
    measured = ratios(FIGURES, FLOORS | {"base_b1": FLOORS["base_b1"] / 1.5})
    found = losses(committed, measured)
    assert found["decode_step_over_floor_b1"] == pytest.approx(0.5)
    assert not any(is_lost(name, loss) for name, loss in found.items())
