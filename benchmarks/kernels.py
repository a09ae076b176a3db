"""Times every op on each backend against the reference and the machine's floor.

    python -m benchmarks.kernels --json OUT

On the GPU if there is one, else on the CPU. The floor of a row is the larger of its bytes over the
measured copy bandwidth and its operations over the measured rate of matrix products. On a CPU the
operands of a small case stay in its caches, which are faster than that.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_cases import LARGE_MODEL, SMALL_MODEL, CaseBuilder, OpCase
from benchmarks.machine import Machine, default_device, measure_machine, time_call
from kernels.backend import Backend, is_available

CPU_BACKENDS: tuple[Backend, ...] = ("cpu", "torch")


def cases(builder: CaseBuilder) -> Iterator[OpCase]:
    """Yield the ops of a decode step and of a prefill step, at sizes that a device can fill."""
    on_gpu = builder.device.type == "cuda"
    decodes = (1, 64, 256) if on_gpu else (1, 32)
    context = 4096 if on_gpu else 512
    chunk = 2048 if on_gpu else 128
    for num_tokens in (*decodes, chunk):
        yield from builder.dense(num_tokens)
        yield builder.store(num_tokens)
        yield builder.rope_and_store(num_tokens)
    for num_sequences in decodes:
        yield builder.decode(num_sequences, context)
        yield from builder.lora([(slot % 64, 1) for slot in range(num_sequences)], 16)
    yield builder.decode(decodes[-1], context, window=context // 4)
    yield builder.decode(decodes[-1], context, fp8=True)
    yield builder.sample(decodes[-1])
    yield builder.prefill(1, chunk, chunk)
    yield builder.prefill(2, chunk // 2, 2 * chunk)
    yield from builder.lora([(0, chunk)], 16)
    yield from builder.lora([(slot, 1) for slot in range(16)] + [(-1, 16), (16, chunk)], 64)


def backends_of(case: OpCase, device: torch.device) -> list[Backend | None]:
    """Return the backends to time a case on; None is the one that serves on a GPU."""
    if device.type == "cuda":
        return [None]
    # The C++ extension leaves quantised caches to torch.
    names: tuple[Backend, ...] = ("torch",) if "scales" in case.options else CPU_BACKENDS
    return [name for name in names if is_available(name, case.op)]


def measure(
    case: OpCase, machine: Machine, device: torch.device, *, with_reference: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each backend of a case, the reference last."""
    times = {
        backend or "default": time_call(partial(case.run, backend), device)
        for backend in backends_of(case, device)
    }
    if with_reference:
        times["reference"] = time_call(partial(case.run, "reference"), device)
    floor_s = machine.floor_s(case.num_bytes, case.flops)
    return [
        {
            "op": case.op,
            "shape": case.shape,
            "dtype": machine.dtype,
            "backend": backend,
            "time_s": time_s,
            "bytes": case.num_bytes,
            "flops": case.flops,
            "floor_s": floor_s,
            "ratio_to_floor": time_s / floor_s,
            "ratio_to_reference": time_s / times["reference"] if with_reference else None,
        }
        for backend, time_s in times.items()
    ]


def main() -> None:
    """Print a table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows and the set-up")
    parser.add_argument("--op", help="only this op")
    arguments = parser.parse_args()
    device = default_device()
    machine = measure_machine(device, torch.bfloat16)
    print(
        f"{machine.device_name}, {machine.num_threads} threads: "
        f"copy {machine.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"matmul {machine.matmul_flops_per_s / 1e9:.0f} GFLOP/s"
    )
    builder = CaseBuilder(
        LARGE_MODEL if device.type == "cuda" else SMALL_MODEL, torch.bfloat16, device
    )
    rows = []
    for case in cases(builder):
        if arguments.op in (None, case.op):
            measured = measure(case, machine, device)
            _print_rows(measured)
            rows += measured
    if arguments.json:
        report = {"setup": dataclasses.asdict(machine), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['op']:13} {row['shape']:56} {row['backend']:9} {row['time_s'] * 1e6:11.1f} us"
            f"  {row['ratio_to_floor']:8.1f} x floor  {row['ratio_to_reference']:7.4f} x reference",
            flush=True,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
