"""The CPU ops in C++, and where they hand over to torch.

Loads the extension that ``python -m kernels.build`` made for this very source and torch, if there
is one; never builds. Callers look at `available` first. Knows which dtypes the extension takes:
others run on torch. The signatures are those of ``kernels.ops``.

Results are repeatable and independent of the number of threads. In `linear`, the norms,
`silu_and_mul` and `lora_apply` a row's result does not depend on the rows beside it, in
`paged_decode` a sequence's not on the sequences beside it. One exception: on CPUs with AMX,
`linear` gives many rows to torch, which promises no such thing.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kernels import torch_ops
from kernels.build import extension_path, load_extension
from kernels.metadata import AttentionBatch, LoRABatch

# The ops that the extension does not have: on a CPU `lora_apply` is one call.
from kernels.torch_ops import lora_expand as lora_expand
from kernels.torch_ops import lora_shrink as lora_shrink

_LOG = logging.getLogger(__name__)
_DTYPES = frozenset({torch.float32, torch.bfloat16})

# From this many rows on, hardware with tiles (AMX) beats all other arithmetic however well done:
# its peak is several times as high. Below, both wait for memory, and torch's call costs more.
_AMX_MIN_ROWS = 32


def _load() -> Any:
    path = extension_path()
    if not path.is_file():
        return None
    try:
        extension = load_extension(path)
    except ImportError as error:
        _LOG.warning("CPU kernels do not load, the ops run on torch: %s", error)
        return None
    extension.set_num_threads(torch.get_num_threads())
    isa = os.environ.get("LORAFLEET_CPU_ISA")
    if isa:
        extension.select_isa(isa)
    return extension


_extension = _load()
_tiles_min_rows = _AMX_MIN_ROWS if torch.cpu._is_amx_tile_supported() else None
_num_threads = torch.get_num_threads()


def available() -> bool:
    """Return whether the extension is built for this source and torch, and loads."""
    return _extension is not None


def extension() -> Any:
    """Return the extension itself; only while `available`."""
    return _extension


def num_threads() -> int:
    """Return how many threads every op uses."""
    return _num_threads


def set_num_threads(count: int) -> None:
    """Let every op use so many threads, the caller's included.

    Torch is left with one: its threads would go on spinning after each of its ops, on the cores
    that ours need.
    """
    global _num_threads
    _num_threads = count
    _extension.set_num_threads(count)
    torch.set_num_threads(1)


@contextmanager
def _torch_threads() -> Iterator[None]:
    """Lend torch the threads while it multiplies for us."""
    before = torch.get_num_threads()
    torch.set_num_threads(_num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def supported_isas() -> list[str]:
    """Return the instruction sets that this CPU runs, slowest first; the last is the default."""
    names: list[str] = _extension.supported_isas()
    return names


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run the process's CPU ops with another instruction set, to test or compare it."""
    previous = _extension.active_isa()
    _extension.select_isa(name)
    try:
        yield
    finally:
        _extension.select_isa(previous)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``; sums are float32."""
    if x.dtype not in _DTYPES or x.dim() != 2 or prefers_torch(x):
        with _torch_threads():
            return torch_ops.linear(x, weight, bias)
    result: torch.Tensor = _extension.linear(x, weight, bias)
    return result


def linear_multi(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return `linear` of one input for each weight, in one call."""
    if x.dtype not in _DTYPES or x.dim() != 2 or prefers_torch(x):
        with _torch_threads():
            return torch_ops.linear_multi(x, weights, biases)
    results: list[torch.Tensor] = _extension.linear_multi(x, weights, biases)
    return results


def prefers_torch(x: torch.Tensor) -> bool:
    """Return whether torch multiplies so many rows faster, on hardware for it."""
    return (
        _tiles_min_rows is not None and x.dtype == torch.bfloat16 and x.shape[0] >= _tiles_min_rows
    )


def lora_apply(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
) -> None:
    """Add the adapters' updates for input x to ys, in place; the result is rounded once."""
    if x.dtype not in _DTYPES:
        torch_ops.lora_apply(x, lora_a, lora_b, ranks, batch, ys)
        return
    _extension.lora_apply(x, lora_a, lora_b, ranks, batch.segment_starts, batch.segment_slots, ys)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend from the one new token of each decode."""
    if query.dtype not in _DTYPES:
        return torch_ops.paged_decode(
            query, key_cache, value_cache, batch, scale=scale, window=window, soft_cap=soft_cap
        )
    sequences = (0, batch.num_decodes)
    return _attend(query, key_cache, value_cache, batch, sequences, (scale, window, soft_cap))


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend causally from the tokens after the decodes."""
    if query.dtype not in _DTYPES:
        return torch_ops.paged_prefill(
            query, key_cache, value_cache, batch, scale=scale, window=window, soft_cap=soft_cap
        )
    sequences = (batch.num_decodes, batch.context_lens.shape[0] - batch.num_decodes)
    return _attend(query, key_cache, value_cache, batch, sequences, (scale, window, soft_cap))


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    sequences: tuple[int, int],
    options: tuple[float, int | None, float | None],
) -> torch.Tensor:
    result: torch.Tensor = _extension.paged_attention(
        query,
        key_cache,
        value_cache,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        *sequences,
        *options,
    )
    return result


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value at its flat position; -1 writes nothing."""
    _extension.store_kv(key, value, key_cache, value_cache, slot_mapping)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * (x / rms(x))``; the quotient is rounded to x's dtype, as Llama does."""
    if x.dtype not in _DTYPES or x.dim() != 2:
        return torch_ops.rms_norm(x, weight, eps)
    result: torch.Tensor = _extension.rms_norm(x, weight, eps)
    return result


def add_rms_norm(
    stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `rms_norm` of the stream after ``stream += update``, in place."""
    if stream.dtype not in _DTYPES or stream.dim() != 2:
        return torch_ops.add_rms_norm(stream, update, weight, eps)
    result: torch.Tensor = _extension.add_rms_norm(stream, update, weight, eps)
    return result


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, rounded once."""
    if gate.dtype not in _DTYPES or gate.dim() != 2:
        return torch_ops.silu_and_mul(gate, up)
    result: torch.Tensor = _extension.silu_and_mul(gate, up)
    return result


def apply_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate queries and keys by their positions, in place, halves paired as transformers does.

    query  [T, H, D]      changed
    key    [T, Hkv, D]    changed
    cos    [T, D]         same dtype
    sin    [T, D]
    """
    if query.dtype not in _DTYPES:
        torch_ops.apply_rope(query, key, cos, sin)
        return
    _extension.apply_rope(query, key, cos, sin)
