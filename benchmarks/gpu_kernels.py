"""The kernels' sections of the GPU check: against float64, and against the device's own copy.

Knows shapes worth checking. Knows nothing of models or time limits but what it is told.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import kernels as kernel_benchmark
from benchmarks.kernel_cases import LARGE_MODEL, CaseBuilder, ModelShape, OpCase
from benchmarks.machine import Machine

Findings = dict[str, Any]

# Rounding of the result, and of the intermediates that are kept in its dtype.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}
_SHAPES = (
    LARGE_MODEL,
    ModelShape("head 64, groups of 3", 576, 1536, 9, 3, 64),
    ModelShape("head 80, multi-head", 640, 1536, 8, 8, 80),
    ModelShape("head 256", 1024, 2048, 8, 4, 256),
)
_TINY_SHAPE = ModelShape("tiny", 48, 64, 4, 2, 16)


def _cases(builder: CaseBuilder, *, tiny: bool) -> Iterator[OpCase]:
    yield from builder.dense(3 if tiny else 33)
    yield builder.store(7 if tiny else 77)
    yield builder.store(7 if tiny else 77, fp8=True)
    yield builder.rope_and_store(5 if tiny else 65)
    yield builder.sample(3, vocab=500) if tiny else builder.sample(16)
    contexts = (20, 30) if tiny else (3000, 333)
    yield builder.decode(1, contexts[0])
    yield builder.decode(3 if tiny else 50, contexts[1])
    yield builder.decode(3, contexts[1], fp8=True)
    yield builder.decode(3, contexts[1], window=contexts[1] // 2, soft_cap=20.0)
    chunks = ((9, 9), (4, 20)) if tiny else ((130, 130), (40, 500))
    for query_len, context in chunks:
        yield builder.prefill(2, query_len, context)
    yield builder.prefill(1, *chunks[1], fp8=True)
    yield builder.prefill(1, *chunks[1], window=chunks[1][1] // 3, soft_cap=20.0)
    for rank in (1, 4) if tiny else (1, 13, 64):
        yield from builder.lora([(slot % 5, 1) for slot in range(6 if tiny else 40)], rank)
        yield from builder.lora([(0, 1), (1, 1), (2, 9 if tiny else 90), (0, 33)], rank)
    yield from builder.lora([(0, 1), (1, 1), (2, 1)], 8, scaled=True)
    yield from builder.lora([(0, 40), (2, 3), (1, 9)], 8, scaled=True)


def _worst_errors(part: tuple[ModelShape, torch.dtype, str, bool]) -> dict[str, float]:
    """Return each op's largest error over its tolerance, for one shape and dtype."""
    model, dtype, device, tiny = part
    worst: dict[str, float] = {}
    with torch.inference_mode():
        for case in _cases(CaseBuilder(model, dtype, torch.device(device)), tiny=tiny):
            error = _relative_error(case) / _TOLERANCE[dtype]
            worst[case.op] = max(worst.get(case.op, 0.0), error)
            if not error <= 1.0:
                print(f"  WRONG {case.op} {case.shape} {dtype}: {error:.1f} x tolerance")
    return worst


def _relative_error(case: OpCase) -> float:
    """Return the largest deviation from float64, relative to 1 + the value; NaN counts as inf."""
    largest = 0.0
    expected = case.outputs("reference", wide=True)
    for actual, wide in zip(case.outputs(), expected, strict=True):
        exact = wide.double()
        error = ((actual.double() - exact).abs() / (1.0 + exact.abs())).nan_to_num(float("inf"))
        largest = max(largest, float(error.max()))
    return largest


def check_numerics(device: torch.device, *, tiny: bool, workers: int) -> Findings:
    """Compare every op with the reference in float64, over shapes, dtypes and ranks.

    With more than one worker, processes share the device: kernels are compiled side by side.
    """
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16]
    parts = [
        (shape, dtype, device.type, tiny)
        for shape in ((_TINY_SHAPE,) if tiny else _SHAPES)
        for dtype in dtypes
    ]
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(parts)), mp_context=context) as pool:
            found = [*pool.map(_worst_errors, parts)]
    else:
        found = [_worst_errors(part) for part in parts]
    worst: dict[str, float] = {}
    for part in found:
        worst |= {op: max(error, worst.get(op, 0.0)) for op, error in part.items()}
    for op, error in sorted(worst.items()):
        print(f"  {op:17} largest error {error:.3f} of the tolerance")
    return {"passed": all(error <= 1.0 for error in worst.values()), "error_to_tolerance": worst}


def check_bandwidth(
    device: torch.device, machine: Machine, left: Callable[[], float], *, tiny: bool
) -> Findings:
    """Time a decode and a prefill step against the floor; slow is reported, not failed."""
    model = _TINY_SHAPE if tiny else LARGE_MODEL
    builder = CaseBuilder(model, getattr(torch, machine.dtype), device)
    cases = _cases(builder, tiny=True) if tiny else kernel_benchmark.cases(builder)
    rows, skipped = [], []
    for case in cases:
        if left() <= 0 and not tiny:
            skipped.append(f"{case.op} {case.shape}")
            continue
        row = kernel_benchmark.measure(case, machine, device, with_reference=False)[0]
        row["bytes_per_s"] = row["bytes"] / row["time_s"]
        row["copy_share"] = row["bytes_per_s"] / machine.copy_bytes_per_s
        row["is_memory_bound"] = (
            row["bytes"] / machine.copy_bytes_per_s > row["flops"] / machine.matmul_flops_per_s
        )
        print(
            f"  {row['op']:17} {row['shape']:56} {row['time_s'] * 1e6:9.1f} us "
            f"{row['copy_share']:6.2f} of copy {row['ratio_to_floor']:6.1f} x floor",
            flush=True,
        )
        rows.append(row)
    return {"passed": True, "rows": rows, "skipped": skipped}
