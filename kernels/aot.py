"""Compiles the Triton kernels for GPUs that this machine does not have.

Runs the real launchers on meta tensors, under a driver that names a target but has no device: what
is compiled is what a launch there would compile, down to the specialisation of its arguments.
Reads registers, spills and shared memory off the result. Knows nothing of speed.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels import tuning
from kernels.kv_store import store_kv
from kernels.lora_expand import lora_expand
from kernels.lora_shrink import lora_shrink
from kernels.metadata import AttentionBatch, LoRABatch
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

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


def compile_all(target: str, cases: dict[str, Callable[[], object]]) -> Iterator[CompiledKernel]:
    """Compile what each case launches; equal kernels of several cases are yielded once."""
    seen = set()
    for run in cases.values():
        with _compile_only(TARGETS[target]) as compiled:
            run()
        for launch in compiled:
            if launch.kernel.hash not in seen:
                seen.add(launch.kernel.hash)
                yield _inspect(target, launch)


@dataclass(frozen=True, slots=True)
class _Launch:
    config: str
    dtype: str
    kernel: Any


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
def _compile_only(target: GPUTarget) -> Iterator[list[_Launch]]:
    """Make launches compile for `target` and be collected, instead of running."""
    compiled: list[_Launch] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        config = " ".join(
            f"{name}={value}" for name, value in kwargs.items() if name != "enable_fp_fusion"
        )
        values = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim > 1]
        dtypes = {arg.dtype for arg in values if arg.dtype.is_floating_point}
        # Intermediates are float32 beside any dtype of the weights and activations.
        dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        compiled.append(_Launch(config, str(dtype).removeprefix("torch."), kernel))
        return kernel

    compile_only = mock.patch.object(JITFunction, "run", warm_up)
    with compile_only, mock.patch.object(driver, "_active", _TargetDriver(target)):
        yield compiled


def _inspect(target: str, launch: _Launch) -> CompiledKernel:
    kernel = launch.kernel
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


_meta = partial(torch.empty, device="meta")


def _attention_batch(num_decodes: int, prefills: int, query_len: int, context: int) -> Any:
    num_sequences = num_decodes + prefills
    return AttentionBatch(
        query_starts=_meta(num_sequences + 1, dtype=torch.int32),
        context_lens=_meta(num_sequences, dtype=torch.int32),
        block_tables=_meta(num_sequences, context // 16, dtype=torch.int32),
        slot_mapping=_meta(num_decodes + prefills * query_len, dtype=torch.int64),
        num_decodes=num_decodes,
        max_query_len=query_len,
        max_context_len=context,
    )


def _decode(
    head_size: int,
    num_decodes: int = 64,
    *,
    groups: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    cache = _meta(4096, 16, 8, head_size, dtype=dtype)
    query = _meta(num_decodes, 8 * groups, head_size, dtype=dtype)
    batch = _attention_batch(num_decodes, 0, 1, 4096)
    paged_decode(query, cache, cache, batch, scale=0.1, **options)


def _prefill(
    head_size: int, query_len: int, *, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    cache = _meta(4096, 16, 8, head_size, dtype=dtype)
    query = _meta(2 * query_len, 32, head_size, dtype=dtype)
    batch = _attention_batch(0, 2, query_len, 4096)
    paged_prefill(query, cache, cache, batch, scale=0.1, **options)


def _store(head_size: int) -> None:
    cache = _meta(4096, 16, 8, head_size, dtype=torch.bfloat16)
    key = _meta(64, 8, head_size, dtype=torch.bfloat16)
    store_kv(key, key, cache, cache, _meta(64, dtype=torch.int64))


def _lora(
    num_tokens: int, segment_len: int, projections: int = 3, dtype: torch.dtype = torch.bfloat16
) -> None:
    num_segments, num_slots, rank, in_size = num_tokens // segment_len, 64, 64, 4096
    batch = LoRABatch(
        token_slots=_meta(num_tokens, dtype=torch.int32),
        segment_starts=_meta(num_segments + 1, dtype=torch.int32),
        segment_slots=_meta(num_segments, dtype=torch.int32),
        max_segment_len=segment_len,
        max_active_rank=rank,
        num_active=num_slots,
    )
    lora_a = _meta(projections, num_slots, rank, in_size, dtype=dtype)
    widths = [4096, 1024, 1024][:projections]
    lora_b = [_meta(num_slots, rank, width, dtype=dtype) for width in widths]
    ys = [_meta(num_tokens, width, dtype=dtype) for width in widths]
    ranks = _meta(projections, num_slots, dtype=torch.int32)
    mid = lora_shrink(_meta(num_tokens, in_size, dtype=dtype), lora_a, ranks, batch)
    lora_expand(mid, lora_b, ranks, batch, ys)


def all_cases() -> dict[str, Callable[[], object]]:
    """Return launches that together use every row of the tables in `kernels.tuning`."""
    cases = {
        "store_kv": partial(_store, 128),
        "lora_rows_few": partial(_lora, 1, 1),
        "lora_rows_many": partial(_lora, 256, 1),
        "lora_tiles_short": partial(_lora, 2048, 32),
        "lora_tiles_long": partial(_lora, 4096, 1024),
        "lora_tiles_long_float16": partial(_lora, 4096, 1024, dtype=torch.float16),
        "lora_tiles_one_projection": partial(_lora, 4096, 1024, 1),
        "decode_window_soft_cap": partial(_decode, 128, window=1024, soft_cap=30.0),
        "decode_split": partial(_decode, 128, 1),
        "decode_multi_head": partial(_decode, 128, groups=1),
        "decode_wide_group": partial(_decode, 64, groups=32),
        "decode_float32": partial(_decode, 128, dtype=torch.float32),
        "prefill_float32": partial(_prefill, 128, 512, dtype=torch.float32),
        "prefill_head_96": partial(_prefill, 96, 512),
    }
    for head_size in tuning.DECODE:
        cases[f"decode_{head_size}"] = partial(_decode, head_size)
        cases[f"prefill_short_{head_size}"] = partial(_prefill, head_size, 8)
        cases[f"prefill_long_{head_size}"] = partial(_prefill, head_size, 512)
    for head_size in (64, 128, 256):
        cases[f"prefill_window_{head_size}"] = partial(
            _prefill, head_size, 512, window=1024, soft_cap=30.0
        )
    return cast(dict[str, Callable[[], object]], cases)
