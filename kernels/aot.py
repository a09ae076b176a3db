"""Compiles the Triton kernels for GPUs that this machine does not have.

Runs the real launchers on meta tensors, under a driver that names a target but has no device: what
is compiled is what a launch there would compile, down to the specialisation of its arguments. Since
a meta tensor has no values, a launcher that waited for one would fail here. Reads registers, spills
and shared memory off the result. Knows nothing of speed; ``kernels.aot_cases`` is what to launch.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that one program may hold. sm_80 stands for its whole generation, whose smaller members
# (8.6, 8.9) have the least.
SHARED_LIMITS = {"sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
MATRIX_KERNELS = {
    "_shrink_tiles_kernel",
    "_expand_tiles_kernel",
    "_decode_kernel",
    "_prefill_kernel",
}
_MATRIX_INSTRUCTION = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel as compiled for one target; `spills` is in bytes on NVIDIA, registers on AMD."""

    kernel: str
    config: str
    dtype: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    tensor_core: bool

    @property
    def defects(self) -> list[str]:
        """Return what keeps this kernel from running well, or at all, on its target."""
        found = []
        if self.spills:
            found.append(f"spills {self.spills}")
        if self.shared_bytes > SHARED_LIMITS[self.target]:
            found.append(f"needs {self.shared_bytes} bytes of shared memory")
        # Products of float32 operands are exact on the vector units.
        if self.kernel in MATRIX_KERNELS and self.dtype != "float32" and not self.tensor_core:
            found.append("has no matrix instruction")
        return found


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: its grid, and its configuration as it is written in the table."""

    kernel: str
    config: str
    dtype: str
    grid: tuple[int, ...]
    compiled: Any


def compile_all(target: str, cases: dict[str, Callable[[], object]]) -> Iterator[CompiledKernel]:
    """Compile what each case launches; equal kernels of several cases are yielded once."""
    seen = set()
    for run in cases.values():
        with _instead_of_running(TARGETS[target], compiles=True) as launches:
            run()
        for launch in launches:
            if launch.compiled.hash not in seen:
                seen.add(launch.compiled.hash)
                yield _inspect(target, launch)


def launches_of(target: str, run: Callable[[], object]) -> list[Launch]:
    """Return what a case launches on the target, without compiling it."""
    with _instead_of_running(TARGETS[target], compiles=False) as launches:
        run()
    return launches


class _TargetDriver:
    """What Triton asks of a driver in order to compile, but not to run."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        # The key of Triton's table of compiled kernels: one table for each target.
        return str(self._target)

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _instead_of_running(target: GPUTarget, *, compiles: bool) -> Iterator[list[Launch]]:
    """Collect launches on `target` instead of running them."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs) if compiles else None
        config = " ".join(
            f"{name}={value}" for name, value in kwargs.items() if name != "enable_fp_fusion"
        )
        launches.append(Launch(self.fn.__name__, config, _dtype_name(args), grid, kernel))
        return kernel

    without_running = mock.patch.object(JITFunction, "run", record)
    with without_running, mock.patch.object(driver, "_active", _TargetDriver(target)):
        yield launches


def _dtype_name(args: tuple[Any, ...]) -> str:
    """Name the dtype of activations: float32 tables and intermediates lie beside any."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim > 1]
    dtypes = {arg.dtype for arg in tensors if arg.dtype.is_floating_point}
    return str(min(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")


def _inspect(target: str, launch: Launch) -> CompiledKernel:
    kernel = launch.compiled
    if "cubin" in kernel.asm:
        assembly = kernel.asm["ptx"]
        registers, spills = _cubin_resources(kernel.asm["cubin"])
    else:
        assembly = kernel.asm["amdgcn"]
        registers = _amd_count(assembly, "vgpr_count")
        # Spilled scalar registers go to lanes of vector registers, not to memory.
        spills = _amd_count(assembly, "vgpr_spill_count")
    return CompiledKernel(
        kernel=kernel.metadata.name,
        config=launch.config,
        dtype=launch.dtype,
        target=target,
        registers=registers,
        spills=spills,
        shared_bytes=kernel.metadata.shared,
        tensor_core=_MATRIX_INSTRUCTION.search(assembly) is not None,
    )


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers a thread, and bytes of stack, which only spills use in these kernels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {report!r}")
    return int(match[1]), int(match[2])


def _amd_count(assembly: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", assembly)
    if match is None:
        raise RuntimeError(f"the assembly has no {name}")
    return int(match[1])
