"""What this machine can do at best: the rates that floors are worked out from.

Knows devices and clocks. Knows nothing of ops or models.
"""

import dataclasses
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

_MIN_ROUNDS = 3
_MAX_ROUNDS = 50
# The copied buffer must not fit any cache.
_COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The set-up of a measurement, with the two rates that bound every op.

    Copy bandwidth counts bytes read and bytes written.
    """

    device: str
    device_name: str
    num_threads: int
    torch_version: str
    triton_version: str
    dtype: str
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor_s(self, num_bytes: int, flops: int) -> float:
        """Return the least time for moving so many bytes and computing so many operations."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure copy bandwidth, and the matrix rate in `dtype` or, if faster, in float32."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = time_call(lambda: target.copy_(source), device)
    size = _MATRIX_SIZE[device.type]
    operands = [torch.randn(size, size, device=device).to(kind) for kind in (dtype, torch.float32)]
    matmul_s = min(time_call(partial(torch.mm, left, left), device) for left in operands)
    return Machine(
        device=device.type,
        device_name=_device_name(device),
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        triton_version=triton.__version__,
        dtype=str(dtype).removeprefix("torch."),
        copy_bytes_per_s=2 * source.numel() / copy_s,
        matmul_flops_per_s=2 * size**3 / matmul_s,
    )


def time_call(call: Callable[[], object], device: torch.device, budget_s: float = 0.5) -> float:
    """Return the fastest of several calls in seconds, after one that is not counted.

    On a GPU the time between two events on the stream, with the second-level cache flushed before.
    """
    call()
    timer = _gpu_timer(device) if device.type == "cuda" else _cpu_time
    samples = [timer(call)]
    rounds = min(max(int(budget_s / max(samples[0], 1e-9)), _MIN_ROUNDS), _MAX_ROUNDS)
    samples += [timer(call) for _ in range(rounds - 1)]
    return min(samples)


def _cpu_time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _gpu_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    # Some 0.3 ms of the fastest device: more than the host needs for the launches of a call, which
    # would otherwise be timed with them.
    flush = torch.empty(1 << 30, dtype=torch.uint8, device=device)

    def timed(call: Callable[[], object]) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The flush also keeps the device busy while the host prepares the launch.
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return timed


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
