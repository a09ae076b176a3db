"""Checks the kernels on this machine's GPU: right numbers, and how near they come to its memory.

    python -m benchmarks.gpu_check --json OUT

Needs no Ray and no downloads. Exits with status 2 on a machine without a GPU, and with status 1 if
a section fails. A section is a function that prints what it does and returns its findings, with
``"passed"`` among them; a new one is added to ``SECTIONS``.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels as kernel_benchmark
from benchmarks.kernel_cases import LARGE_MODEL, CaseBuilder, ModelShape, OpCase
from benchmarks.machine import Machine, measure_machine

Findings = dict[str, Any]

# Rounding of a bfloat16 or float16 result, and of the intermediates that are kept in that dtype.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_SHAPES = (
    LARGE_MODEL,
    ModelShape("head 64, groups of 3", 576, 1536, 9, 3, 64),
    ModelShape("head 80, multi-head", 640, 1536, 8, 8, 80),
    ModelShape("head 256", 1024, 2048, 8, 4, 256),
)


def _numerics_cases(builder: CaseBuilder) -> Iterator[OpCase]:
    yield from builder.dense(33)
    yield builder.store(77)
    yield builder.decode(1, 3000)
    yield builder.decode(50, 333)
    yield builder.decode(3, 700, window=300, soft_cap=20.0)
    yield builder.prefill(2, 130, 130)
    yield builder.prefill(2, 40, 500)
    yield builder.prefill(1, 100, 400, window=70, soft_cap=20.0)
    for rank in (1, 13, 64):
        yield from builder.lora([(slot % 5, 1) for slot in range(40)], rank)
        yield from builder.lora([(0, 1), (1, 1), (2, 90), (0, 333)], rank)


def check_numerics(device: torch.device, machine: Machine) -> Findings:
    """Compare every op with the reference in float64, over shapes, dtypes and ranks."""
    worst: dict[str, float] = {}
    for model in _SHAPES:
        for dtype, tolerance in _TOLERANCE.items():
            for case in _numerics_cases(CaseBuilder(model, dtype, device)):
                error = _relative_error(case) / tolerance
                worst[case.op] = max(worst.get(case.op, 0.0), error)
                if not error <= 1.0:
                    print(f"  WRONG {case.op} {case.shape} {dtype}: {error:.1f} x tolerance")
    for op, error in sorted(worst.items()):
        print(f"  {op:13} largest error {error:.3f} of the tolerance")
    return {"passed": all(error <= 1.0 for error in worst.values()), "error_to_tolerance": worst}


def _relative_error(case: OpCase) -> float:
    """Return the largest deviation from float64, relative to 1 + the value; NaN counts as inf."""
    largest = 0.0
    expected = case.outputs("reference", wide=True)
    for actual, wide in zip(case.outputs(), expected, strict=True):
        error = ((actual.double() - wide).abs() / (1.0 + wide.abs())).nan_to_num(float("inf"))
        largest = max(largest, float(error.max()))
    return largest


def check_bandwidth(device: torch.device, machine: Machine) -> Findings:
    """Time a decode and a prefill step against the floor; slow is reported, not failed."""
    builder = CaseBuilder(LARGE_MODEL, torch.bfloat16, device)
    rows = []
    for case in kernel_benchmark.cases(builder):
        row = kernel_benchmark.measure(case, machine, device, with_reference=False)[0]
        print(
            f"  {row['op']:13} {row['shape']:56} {row['time_s'] * 1e6:9.1f} us "
            f"{row['bytes'] / row['time_s'] / 1e9:7.0f} GB/s {row['ratio_to_floor']:6.1f} x floor"
        )
        rows.append(row)
    return {"passed": True, "rows": rows}


SECTIONS: dict[str, Callable[[torch.device, Machine], Findings]] = {
    "kernel numerics": check_numerics,
    "kernel bandwidth": check_bandwidth,
}


def main() -> int:
    """Run the sections and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the findings")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: no GPU that torch can use on this machine; nothing was checked")
        return 2
    device = torch.device("cuda")
    machine = measure_machine(device, torch.bfloat16)
    print(
        f"{machine.device_name}: copy {machine.copy_bytes_per_s / 1e9:.0f} GB/s, "
        f"matmul {machine.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    report: Findings = {"setup": dataclasses.asdict(machine), "sections": {}}
    for name, section in SECTIONS.items():
        print(f"{name}:")
        start = time.perf_counter()
        findings = section(device, machine)
        print(f"  {'passed' if findings['passed'] else 'FAILED'}", flush=True)
        report["sections"][name] = {**findings, "duration_s": time.perf_counter() - start}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0 if all(found["passed"] for found in report["sections"].values()) else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
