"""The committed results as the tables of ``docs/performance.md``.

    python -m benchmarks.report

Reads ``benchmarks/results`` alone, measures nothing.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling_fit import end_exponent, fit_line

RESULTS = Path(__file__).parent / "results"
Report = dict[str, Any]

# Name in a report's ratios, what it says, and what it should be at least or at most.
_ENGINE_RATIOS = (
    ("mixed8_over_base", "8 adapters in a batch of 8, over the base model alone", "≥ 0.92"),
    ("mixed16_over_base", "16 adapters in a batch of 16, 64 in slots", "≥ 0.85"),
    ("mixed64_over_base", "64 adapters in a batch of 64", "≥ 0.85"),
    ("lora_enabled_base_over_disabled", "base model with LoRA enabled, over disabled", "≥ 0.98"),
    ("mixed8_over_peft", "8 adapters, over PEFT's mixed batch", "≥ 4"),
    ("mixed16_over_peft", "16 adapters, over PEFT's mixed batch", "≥ 8"),
    ("decode_step_over_floor_b1", "decode step of 1, over the floor", "≤ 1.6"),
    ("decode_step_over_floor_b8", "decode step of 8, over the floor", "≤ 1.6"),
    ("prefill_over_matrix_rate", "prompt of 512 tokens, share of the matrix rate", "≥ 0.6"),
    ("zipf1000_over_base", "1,000 names under Zipf's law, over base traffic", "≥ 0.80"),
    ("slots_thrash_ttft", "TTFT with half as many slots as adapters, over enough", "≤ 2"),
)


def engine_table(report: Report) -> str:
    """Figures of every case."""
    rows = [
        (name, f"{case['tokens_per_s']:.0f}", _ms(case["decode_step_s"]), _ms(case["ttft_p50_s"]))
        for name, case in report["figures"].items()
    ]
    return _table(("case", "tokens/s", "decode step, ms", "TTFT p50, ms"), rows)


def engine_ratio_table(report: Report) -> str:
    """The ratios with what was aimed at."""
    ratios = report["ratios"]
    rows = [(text, f"{ratios[name]:.2f}", aim) for name, text, aim in _ENGINE_RATIOS]
    return _table(("ratio", "measured", "aim"), rows)


def peers_table(report: Report) -> str:
    """The first server over each other one, cell by cell."""
    figures, ratios = report["figures"], report["ratios"]
    first = next(iter(next(iter(figures.values()))))
    others = [name for name in next(iter(figures.values())) if name != first]
    header = ["load", f"{first}, tokens/s"]
    for other in others:
        header += [f"{other}, tokens/s", "times", "TTFT times", "inter-token times"]
    rows = []
    for cell, by_server in figures.items():
        row = [cell, f"{by_server[first]['output_tokens_per_s']:.0f}"]
        for other in others:
            ratio = ratios[cell][other]
            row += [f"{by_server[other]['output_tokens_per_s']:.0f}"]
            row += [f"{ratio[key]:.2f}" for key in ("output_tokens_per_s", "ttft_p50", "itl_p50")]
        rows.append(row)
    return _table(header, rows)


def layers_table(report: Report) -> str:
    """The server beside the bare engine."""
    rows = [
        (
            clients,
            f"{by['engine']['output_tokens_per_s']:.0f}",
            f"{by['server']['output_tokens_per_s']:.0f}",
            f"{report['ratios'][clients]['throughput']:.2f}",
            f"{report['ratios'][clients]['added_ttft_p50_ms']:.1f}",
        )
        for clients, by in report["figures"].items()
    ]
    header = ("clients", "engine, tokens/s", "server, tokens/s", "ratio", "added TTFT p50, ms")
    return _table(header, rows)


def features_table(report: Report) -> str:
    """What kinds of adapters cost."""
    results = report["results"]
    plain = results["all plain"]["decode_step_s"]
    rows = [
        (name, _ms(case["decode_step_s"]), f"{case['decode_step_s'] / plain:.2f}")
        for name, case in results.items()
    ]
    return _table(("adapters in a batch of 8", "decode step, ms", "over all plain"), rows)


# A curve's name, what it is against, and the shape that theory gives.
_SCALING_SHAPES = (
    ("batch_base", "batch, base model", "constant + linear"),
    ("batch_mixed", "batch, an adapter each", "constant + linear"),
    ("context", "context of a batch of 4", "constant + linear"),
    ("resident", "resident adapters, batch of 16", "flat from 16 on"),
    ("rank", "rank of 8 adapters", "constant + linear"),
    ("names", "registered names", "flat"),
    ("names_report", "registered names, a report a second", "linear"),
)


def scaling_table(report: Report) -> str:
    """Every curve's ends, line and exponent beside the shape that it should have."""
    rows = []
    for name, what, shape in _SCALING_SHAPES:
        xs, seconds = report["curves"][name]["x"], report["curves"][name]["seconds"]
        line = fit_line(xs, seconds)
        rows.append(
            (
                what,
                f"{xs[0]:,} to {xs[-1]:,}",
                f"{_fine_ms(seconds[0])} to {_fine_ms(seconds[-1])}",
                shape,
                f"{_fine_ms(line.intercept)} ms + {_us(line.slope)} µs each",
                f"{100 * line.worst:.0f} %",
                f"{end_exponent(xs, seconds):.2f}",
            )
        )
    header = ("against", "range", "step, ms", "expected", "line found", "off", "exponent")
    return _table(header, rows)


TABLES: Mapping[str, tuple[str, Callable[[Report], str]]] = {
    "ratios": ("engine.json", engine_ratio_table),
    "engine": ("engine.json", engine_table),
    "scaling": ("scaling.json", scaling_table),
    "peers": ("peers.json", peers_table),
    "layers": ("layers.json", layers_table),
    "features": ("adapter_features.json", features_table),
}


def tables() -> Iterator[tuple[str, str]]:
    """Every table by its name."""
    for name, (file, make) in TABLES.items():
        yield name, make(json.loads((RESULTS / file).read_text()))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ms(seconds: float) -> str:
    return "" if seconds != seconds else f"{1e3 * seconds:.1f}"


def _fine_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _us(seconds: float) -> str:
    # The slope of a flat curve may be a negative nothing.
    value = 1e6 * seconds
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}".replace("-0.00", "0.00")


def main() -> None:
    """Print all tables."""
    for name, table in tables():
        print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    main()
