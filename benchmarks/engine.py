"""The engine in this process: base against many adapters, PEFT's mixed batch, and the floor.

    python -m benchmarks.engine --model .cache/models/smollm2-135m-instruct --json OUT

All cases run in turns. A ratio is of two cases of one turn that follow each other closely, and the
median over the turns is reported: a machine that is slower for a minute is so for both. Floors too
are worked out from rates that are measured beside the case.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters import write_random_adapters
from benchmarks.engine_under_test import (
    DEFAULT_MODEL,
    EngineUnderTest,
    EngineUnderTraffic,
    Measured,
    Traffic,
    Workload,
    on_disk,
)
from benchmarks.floor import Floor, Rates, kv_bytes, measure_rates, prefill_flops, weight_bytes
from benchmarks.machine import measure_machine
from benchmarks.peft_under_test import fastest_peft
from engine import LoRAConfig

PREFILL_TOKENS = 512
NUM_NAMES = 1000

Figures = Mapping[str, Mapping[str, float]]
Case = Callable[[], Measured]


@dataclass(frozen=True, slots=True)
class Turn:
    """Every case once, and the floor of those that have one, in seconds."""

    figures: dict[str, dict[str, float]]
    floors: dict[str, float]


def run_turns(
    cases: Mapping[str, Case], repeats: int, floors: Mapping[str, Floor], threads: int
) -> list[Turn]:
    """Run all cases in turn, ``repeats`` times after a turn that does not count."""
    turns = []
    for number in range(repeats + 1):
        turn = Turn({}, {})
        for name, case in cases.items():
            rates = [measure_rates(threads)] if name in floors else []
            result = case()
            if name in floors:
                both = Rates.fastest([*rates, measure_rates(threads)])
                turn.floors[name] = floors[name].seconds(both)
            turn.figures[name] = asdict(result)
            print(f"{number}/{repeats} {name:28} {result.tokens_per_s:8.1f} tok/s", flush=True)
        if number:
            turns.append(turn)
    return turns


def run_cases(cases: Mapping[str, Case], repeats: int) -> dict[str, dict[str, float]]:
    """Run all cases in turn and take medians."""
    turns = run_turns(cases, repeats, {}, 1)
    return {name: medians([turn.figures[name] for turn in turns]) for name in cases}


def medians(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each field."""
    return {field: statistics.median(one[field] for one in many) for field in many[0]}


def measure(
    model: Path,
    root: Path,
    *,
    repeats: int,
    threads: int,
    peft: bool,
    only: Container[str] | None = None,
) -> dict[str, Any]:
    """Run everything, or the cases named in `only`, and return figures and ratios."""
    torch.set_num_threads(threads)
    machine = measure_machine(torch.device("cpu"), torch.bfloat16)
    cases = make_cases(model, root, threads, peft=peft, only=only)
    floors = {
        f"base_b{batch}": Floor(
            weight_bytes(model) + kv_bytes(model, batch, 75 + 32), batch * weight_bytes(model)
        )
        for batch in (1, 8)
    }
    floors[f"prefill{PREFILL_TOKENS}"] = Floor(
        weight_bytes(model), prefill_flops(model, PREFILL_TOKENS)
    )
    turns = run_turns(cases, repeats, floors, threads)
    return {
        "machine": asdict(machine),
        "model": model.name,
        "repeats": repeats,
        "floors_s": medians([turn.floors for turn in turns]),
        "figures": {name: medians([turn.figures[name] for turn in turns]) for name in cases},
        "ratios": medians([ratios(turn.figures, turn.floors) for turn in turns]),
    }


def make_cases(
    model: Path, root: Path, threads: int, *, peft: bool, only: Container[str] | None
) -> dict[str, Case]:
    """All cases, or those named in `only`; what is compared follows each other."""
    paths = write_random_adapters(model, root / "few", num_adapters=64)
    plain = EngineUnderTest(model, None, [], threads, "auto")
    many = LoRAConfig(max_loras=64, max_cpu_loras=64, max_lora_rank=16)
    mixed = EngineUnderTest(model, many, paths, threads, "auto")
    half = LoRAConfig(max_loras=8, max_cpu_loras=64)
    few = EngineUnderTest(model, half, paths[:16], threads, "auto")
    prefill = Workload(1, 0, prompt_tokens=PREFILL_TOKENS, output_tokens=1)
    cases: dict[str, Case] = {f"prefill{PREFILL_TOKENS}": partial(mixed.run, prefill)}
    for batch in (1, 8, 16):
        cases[f"base_b{batch}_lora_disabled"] = partial(plain.run, Workload(batch, 0))
        cases[f"base_b{batch}"] = partial(mixed.run, Workload(batch, 0))
        for adapters in {batch, min(batch, 8), 1}:
            name = f"mixed{adapters}_b{batch}"
            cases[name] = partial(mixed.run, Workload(batch, adapters))
    cases["slots8_adapters16_b16"] = partial(few.run, Workload(16, 16))
    cases["base_b64"] = partial(mixed.run, Workload(64, 0))
    cases["mixed64_b64"] = partial(mixed.run, Workload(64, 64))
    if only is None or f"zipf{NUM_NAMES}" in only:
        cases |= zipf_cases(model, root / "many", threads)
    if peft:
        faster = fastest_peft(model, paths[:16], threads)
        for batch in (8, 16):
            cases[f"peft_mixed{batch}_b{batch}"] = partial(faster.run, Workload(batch, batch))
    return {name: case for name, case in cases.items() if only is None or name in only}


def zipf_cases(model: Path, root: Path, threads: int) -> dict[str, Case]:
    """A thousand adapters on disk, of which 128 fit into memory and 32 into slots."""
    loras = [on_disk(path) for path in write_random_adapters(model, root, num_adapters=NUM_NAMES)]
    by_name = Traffic(loras)
    config = LoRAConfig(max_loras=32, max_cpu_loras=128, max_lora_rank=16)
    engine = EngineUnderTraffic(model, config, by_name.clients, threads)
    return {
        "base_traffic": partial(engine.run, Traffic([])),
        f"zipf{NUM_NAMES}": partial(engine.run, by_name),
    }


_RATES = (
    ("mixed1_over_base_b8", "mixed1_b8", "base_b8"),
    ("mixed8_over_base", "mixed8_b8", "base_b8"),
    ("mixed16_over_base", "mixed16_b16", "base_b16"),
    ("mixed64_over_base", "mixed64_b64", "base_b64"),
    ("slots_thrash_throughput", "slots8_adapters16_b16", "mixed16_b16"),
    ("zipf1000_over_base", "zipf1000", "base_traffic"),
    ("mixed8_over_peft", "mixed8_b8", "peft_mixed8_b8"),
    ("mixed16_over_peft", "mixed16_b16", "peft_mixed16_b16"),
)


def ratios(figures: Figures, floors: Mapping[str, float]) -> dict[str, float]:
    """The comparisons that matter, each within one turn. PEFT runs in its faster dtype."""
    found = {
        name: figures[case]["tokens_per_s"] / figures[other]["tokens_per_s"]
        for name, case, other in _RATES
        if case in figures and other in figures
    }
    disabled = [name for name in figures if name.endswith("_lora_disabled")]
    found["lora_enabled_base_over_disabled"] = statistics.fmean(
        figures[name.removesuffix("_lora_disabled")]["tokens_per_s"] / figures[name]["tokens_per_s"]
        for name in disabled
    )
    for name, floor in floors.items():
        if name.startswith("prefill"):
            found["prefill_over_matrix_rate"] = floor / figures[name]["ttft_p50_s"]
        else:
            batch = name.removeprefix("base_")
            found[f"decode_step_over_floor_{batch}"] = figures[name]["decode_step_s"] / floor
    few, enough = figures["slots8_adapters16_b16"], figures["mixed16_b16"]
    found["slots_thrash_ttft"] = few["ttft_p50_s"] / enough["ttft_p50_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peft", action="store_true", help="skip the comparison with PEFT")
    parser.add_argument("--only", nargs="+", help="run these cases alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = measure(
            args.model,
            Path(root),
            repeats=args.repeats,
            threads=args.threads,
            peft=not args.no_peft,
            only=args.only,
        )
    for name, figure in result["figures"].items():
        print(f"{name:28} {figure['tokens_per_s']:9.1f} tok/s", end="")
        print(f"  step {figure['decode_step_s'] * 1e3:7.2f} ms")
    for name, value in result["ratios"].items():
        print(f"{name:34} {value:7.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
