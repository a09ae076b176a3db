"""What this machine can do at best: the rates that floors are worked out from."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_COPY_BYTES = 256 << 20
_MATRIX_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """One device, with its measured copy bandwidth (bytes read + written) and matrix rate."""

    device_name: str
    num_threads: int
    torch_version: str
    dtype: str
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor_s(self, num_bytes: int, flops: int) -> float:
        """Return the least time for moving so many bytes and computing so many operations."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def time_call(function: Callable[[], object], device: torch.device, budget_s: float = 0.3) -> float:
    """Return the fastest of several calls in seconds, after one that is not counted."""

    def run() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    best = float("inf")
    end = time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure copy bandwidth, and the matrix rate in `dtype`."""
    on_gpu = device.type == "cuda"
    size = 8 * _MATRIX_SIZE if on_gpu else _MATRIX_SIZE
    source = torch.ones(_COPY_BYTES * (8 if on_gpu else 1), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(size, size, device=device, dtype=dtype)
    copy_s = time_call(lambda: target.copy_(source), device)
    matmul_s = time_call(lambda: left @ left, device)
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor()
    return Machine(
        device_name=name or f"{platform.machine()} with {os.cpu_count()} cores",
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
        copy_bytes_per_s=2 * source.nbytes / copy_s,
        matmul_flops_per_s=2 * size**3 / matmul_s,
    )
