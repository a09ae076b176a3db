"""The ops with the shapes of a real model's serving step, and what each must move and compute.

Knows the contracts of ``kernels.ops``. Knows nothing of time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels import ops
from kernels.backend import Backend
from kernels.metadata import AttentionBatch, KVScales, LoRABatch
from kernels.reference import quantise

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that the ops see."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int


SMALL_MODEL = ModelShape("135M", 576, 1536, 9, 3, 64)
LARGE_MODEL = ModelShape("8B", 4096, 14336, 32, 8, 128)


@dataclass(frozen=True, slots=True)
class OpCase:
    """One call of an op. `num_bytes` counts each byte that must be read or written once."""

    op: str
    shape: str
    args: tuple[Any, ...]
    num_bytes: int
    flops: int
    changed: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: Backend | None = None) -> object:
        """Call the op."""
        function: Callable[..., object] = getattr(ops, self.op)
        return function(*self.args, backend=backend, **self.options)

    def outputs(self, backend: Backend | None = None, *, wide: bool = False) -> list[torch.Tensor]:
        """Call the op on copies of what it changes and return its results.

        With `wide` the arguments are float64.
        """
        args = tuple(
            _copy(arg, wide=wide, change=index in self.changed)
            for index, arg in enumerate(self.args)
        )
        function: Callable[..., object] = getattr(ops, self.op)
        result = function(*args, backend=backend, **self.options)
        found = [args[index] for index in self.changed] or [result]
        return [tensor for value in found for tensor in _tensors(value)]


def _copy(value: Any, *, wide: bool, change: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, wide=wide, change=change) for item in value)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        # Codes of a quantised cache mean nothing without their scales.
        widens = wide and value.dtype.itemsize > 1
        return value.to(torch.float64 if widens else value.dtype, copy=change)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]


class CaseBuilder:
    """Makes cases of one model's shape, dtype and device from a seeded generator."""

    def __init__(self, model: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(0)

    def dense(self, num_tokens: int) -> Iterator[OpCase]:
        """Yield the ops that every token passes outside attention and LoRA."""
        model, size = self.model, self.dtype.itemsize
        x = self._random(num_tokens, model.hidden)
        weight = self._random(model.intermediate, model.hidden) / model.hidden**0.5
        gate, up = self._random(2, num_tokens, model.intermediate)
        shape = f"{model.name} tokens={num_tokens}"
        products = num_tokens * weight.numel()
        moved = x.numel() + weight.numel() + gate.numel()
        yield OpCase("linear", shape, (x, weight), moved * size, 2 * products)
        scale, eps = self._random(model.hidden), 1e-5
        yield OpCase("rms_norm", shape, (x, scale, eps), 2 * x.numel() * size, 4 * x.numel())
        added = (x.clone(), x, scale, eps)
        yield OpCase("add_rms_norm", shape, added, 4 * x.numel() * size, 5 * x.numel(), (0,))
        yield OpCase("silu_and_mul", shape, (gate, up), 3 * gate.numel() * size, 5 * gate.numel())

    def store(self, num_tokens: int, *, fp8: bool = False) -> OpCase:
        """Return a write of `num_tokens` keys and values to scattered positions."""
        key, value = self._random(2, num_tokens, self.model.num_kv_heads, self.model.head_size)
        caches, options = self._caches(-(-num_tokens // BLOCK_SIZE), fp8=fp8)
        mapping = torch.randperm(num_tokens, generator=self._generator, device=self.device)
        written = key.numel() * caches[0].dtype.itemsize
        num_bytes = 2 * (key.nbytes + written) + mapping.nbytes
        args = (key, value, *caches, mapping)
        shape = f"{self.model.name} tokens={num_tokens}{' fp8' if fp8 else ''}"
        return OpCase("store_kv", shape, args, num_bytes, 0, (2, 3), options)

    def rope_and_store(self, num_tokens: int) -> OpCase:
        """Return the same after a rotation of queries and keys."""
        model = self.model
        query = self._random(num_tokens, model.num_heads, model.head_size)
        key, value = self._random(2, num_tokens, model.num_kv_heads, model.head_size)
        caches, _ = self._caches(-(-num_tokens // BLOCK_SIZE))
        angles = self._random(num_tokens, model.head_size // 2).repeat(1, 2)
        rotary = (angles.cos(), angles.sin())
        mapping = torch.randperm(num_tokens, generator=self._generator, device=self.device)
        num_bytes = 2 * query.nbytes + 4 * key.nbytes + 2 * angles.nbytes + mapping.nbytes
        args = (query, key, value, rotary, *caches, mapping)
        shape = f"{model.name} tokens={num_tokens}"
        return OpCase("rope_and_store_kv", shape, args, num_bytes, 0, (0, 4, 5))

    def sample(self, num_rows: int, vocab: int = 128256) -> OpCase:
        """Return draws from logits; each row is counted as read once for every question but one."""
        logits = self._random(num_rows, vocab).float() * 2
        params = torch.tensor([1.0, 50.0, 0.9, 0.0], device=self.device).expand(num_rows, 4)
        seeds = torch.arange(num_rows, device=self.device) * 12345
        args = (logits, params.contiguous(), seeds)
        return OpCase("sample_tokens", f"rows={num_rows} vocab={vocab}", args, logits.nbytes, 0)

    def decode(self, num_sequences: int, context: int, **options: Any) -> OpCase:
        """Return decodes that share one context length."""
        return self._attention("paged_decode", num_sequences, 1, context, options)

    def prefill(self, num_sequences: int, query_len: int, context: int, **options: Any) -> OpCase:
        """Return chunks of `query_len` new tokens at the end of their contexts."""
        return self._attention("paged_prefill", num_sequences, query_len, context, options)

    def _attention(
        self, op: str, num_sequences: int, query_len: int, context: int, options: dict[str, Any]
    ) -> OpCase:
        model = self.model
        blocks = -(-context // BLOCK_SIZE)
        order = torch.randperm(
            num_sequences * blocks, generator=self._generator, device=self.device
        )
        lengths = torch.arange(num_sequences + 1, dtype=torch.int32, device=self.device)
        batch = AttentionBatch(
            query_starts=lengths * query_len,
            context_lens=torch.full_like(lengths[1:], context),
            block_tables=order.view(num_sequences, blocks).to(torch.int32),
            slot_mapping=torch.full((num_sequences * query_len,), -1, device=self.device),
            num_decodes=num_sequences if op == "paged_decode" else 0,
            max_query_len=query_len,
            max_context_len=context,
        )
        query = self._random(num_sequences * query_len, model.num_heads, model.head_size)
        window = options.get("window") or context
        # Query i from the end of a chunk sees i positions less, and no more than the window.
        seen = sum(min(window, context - index) for index in range(query_len))
        span = min(context, window + query_len - 1)
        kv_numel = 2 * num_sequences * span * model.num_kv_heads * model.head_size
        notes = "".join(f" {name}={value}" for name, value in options.items())
        fp8 = options.pop("fp8", False)
        caches, quantised = self._caches(num_sequences * blocks, fp8=fp8)
        return OpCase(
            op,
            f"{model.name} sequences={num_sequences} new={query_len} context={context}{notes}",
            (query, *caches, batch),
            kv_numel * caches[0].dtype.itemsize + 2 * query.nbytes,
            4 * num_sequences * seen * model.num_heads * model.head_size,
            options={"scale": model.head_size**-0.5, **quantised, **options},
        )

    def lora(
        self, segments: Sequence[tuple[int, int]], rank: int, *, scaled: bool = False
    ) -> Iterator[OpCase]:
        """Yield shrink and apply of the attention's three projections; segments (slot, tokens)."""
        model, size = self.model, self.dtype.itemsize
        batch = self._lora_batch(segments, rank)
        num_slots = max(slot for slot, _ in segments) + 1
        widths = [model.num_heads * model.head_size] + [model.num_kv_heads * model.head_size] * 2
        num_tokens = batch.token_slots.shape[0]
        x = self._random(num_tokens, model.hidden)
        lora_a = self._random(3, num_slots, rank, model.hidden) / model.hidden**0.5
        lora_b = [self._random(num_slots, rank, width) / rank**0.5 for width in widths]
        ys = [self._random(num_tokens, width) for width in widths]
        ranks = torch.full((3, num_slots), rank, dtype=torch.int32, device=self.device)
        shape = (
            f"{model.name} tokens={num_tokens} adapters={batch.num_active} "
            f"longest={batch.max_segment_len} rank={rank}{' scaled' if scaled else ''}"
        )
        adapted = sum(length for slot, length in segments if slot >= 0)
        shrink_bytes = (
            adapted * model.hidden + batch.num_active * 3 * rank * model.hidden
        ) * size + 3 * adapted * rank * 4
        shrink_flops = 2 * adapted * 3 * rank * model.hidden
        args = (x, lora_a, ranks, batch)
        yield OpCase("lora_shrink", shape, args, shrink_bytes, shrink_flops)
        expand_bytes = (batch.num_active * rank + 2 * adapted) * sum(widths) * size
        yield OpCase(
            "lora_apply",
            shape,
            (x, lora_a, lora_b, ranks, batch, ys),
            shrink_bytes - 3 * adapted * rank * 4 + expand_bytes,
            shrink_flops + 2 * adapted * rank * sum(widths),
            (5,),
            {"scales": self._scales(num_slots, widths)} if scaled else {},
        )

    def _scales(self, num_slots: int, widths: Sequence[int]) -> list[torch.Tensor]:
        """Return what DoRA multiplies and biases add, by slot."""
        return [self._random(num_slots + 1, 2, width).float() for width in widths]

    def _lora_batch(self, segments: Sequence[tuple[int, int]], rank: int) -> LoRABatch:
        lengths = torch.tensor([length for _, length in segments], dtype=torch.int32)
        slots = torch.tensor([slot for slot, _ in segments], dtype=torch.int32)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(torch.int32)])
        return LoRABatch(
            token_slots=slots.repeat_interleave(lengths.long()).to(self.device),
            segment_starts=starts.to(self.device),
            segment_slots=slots.to(self.device),
            max_segment_len=int(lengths.max()),
            max_active_rank=rank,
            num_active=len({slot for slot, _ in segments if slot >= 0}),
        )

    def _caches(
        self, num_blocks: int, *, fp8: bool = False
    ) -> tuple[list[torch.Tensor], dict[str, KVScales]]:
        """Return keys and values, and the options of an op that reads them."""
        shape = (num_blocks, BLOCK_SIZE, self.model.num_kv_heads, self.model.head_size)
        caches = [self._random(*shape), self._random(*shape)]
        if not fp8:
            return caches, {}
        (key, key_scales), (value, value_scales) = map(quantise, caches)
        return [key, value], {"scales": KVScales(key_scales, value_scales)}

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return values.to(self.dtype)
