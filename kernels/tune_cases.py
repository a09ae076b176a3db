"""What the tuner launches for each row of a table: an 8B Llama's shapes, on a real device.

The counterpart of ``kernels.aot_cases`` with values that can be run.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.kv_store import store_kv
from kernels.lora_expand import lora_expand
from kernels.lora_shrink import lora_shrink
from kernels.metadata import AttentionBatch, KVScales, LoRABatch
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm
from kernels.sample_tokens import sample_tokens
from kernels.silu_and_mul import silu_and_mul
from kernels.tune import Case

_BLOCK_SIZE = 16
_CONTEXT = 4096
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _VOCAB = 4096, 14336, 32, 8, 128256
_RANK = 16
_WIDTHS = (4096, 1024, 1024)


def _lazy(build: Callable[[], Case]) -> Case:
    """Return a case that makes its tensors when it is run for the first time."""
    built: list[Case] = []

    def run() -> Sequence[torch.Tensor]:
        if not built:
            built.append(build())
        return built[0]()

    return run


class _Builder:
    """Makes cases on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def integers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def dense(self, width: int) -> Case:
        x, weight = self.random(256, width), self.random(width)
        return lambda: [rms_norm(x, weight, 1e-5)]

    def gate(self) -> Case:
        gate, up = self.random(256, _INTERMEDIATE), self.random(256, _INTERMEDIATE)
        return lambda: [silu_and_mul(gate, up)]

    def sample(self) -> Case:
        logits = self.random(64, _VOCAB).float()
        params = torch.tensor([[1.0, 50.0, 0.9, 0.0]] * 64, device=self._device)
        seeds = torch.arange(64, device=self._device)
        return lambda: [sample_tokens(logits, params, seeds)]

    def store(self) -> Case:
        key = self.random(256, _KV_HEADS, 128)
        cache = self.random(256 // _BLOCK_SIZE, _BLOCK_SIZE, _KV_HEADS, 128)
        slots = torch.arange(256, device=self._device)

        def run() -> Sequence[torch.Tensor]:
            store_kv(key, key, cache, cache, slots)
            return [cache]

        return run

    def cache(
        self, num_blocks: int, head_size: int, *, fp8: bool
    ) -> tuple[torch.Tensor, KVScales | None]:
        """Return what stands for keys and for values: the kernels read both."""
        cache = self.random(num_blocks, _BLOCK_SIZE, _KV_HEADS, head_size)
        if not fp8:
            return cache, None
        table = torch.ones(cache.shape[:3], device=self._device)
        return cache.to(torch.float8_e4m3fn), KVScales(table, table)

    def attention(self, op: str, head_size: int, query_len: int, *, fp8: bool = False) -> Case:
        sequences = 32 if op == "decode" else 4
        blocks = _CONTEXT // _BLOCK_SIZE
        cache, scales = self.cache(sequences * blocks, head_size, fp8=fp8)
        tables = torch.randperm(sequences * blocks, device=self._device).to(torch.int32)
        batch = AttentionBatch(
            query_starts=self.integers([query_len * row for row in range(sequences + 1)]),
            context_lens=self.integers([_CONTEXT] * sequences),
            block_tables=tables.view(sequences, blocks),
            slot_mapping=torch.full((sequences * query_len,), -1, device=self._device),
            num_decodes=sequences if op == "decode" else 0,
            max_query_len=query_len,
            max_context_len=_CONTEXT,
        )
        query = self.random(sequences * query_len, _HEADS, head_size)
        attend = paged_decode if op == "decode" else paged_prefill
        scale = head_size**-0.5
        return lambda: [attend(query, cache, cache, batch, scale=scale, scales=scales)]

    def lora(self, op: str, segments: int, segment_len: int) -> Case:
        num_tokens, num_slots = segments * segment_len, min(segments, 64)
        slots = [segment % num_slots for segment in range(segments)]
        batch = LoRABatch(
            token_slots=self.integers(slots).repeat_interleave(segment_len),
            segment_starts=self.integers([segment_len * row for row in range(segments + 1)]),
            segment_slots=self.integers(slots),
            max_segment_len=segment_len,
            max_active_rank=_RANK,
            num_active=num_slots,
        )
        x = self.random(num_tokens, _HIDDEN)
        lora_a = self.random(3, num_slots, _RANK, _HIDDEN) / _HIDDEN**0.5
        ranks = self.integers([_RANK] * (3 * num_slots)).view(3, num_slots)
        lora_b = [self.random(num_slots, _RANK, width) for width in _WIDTHS]
        mid = torch.randn(3, num_tokens, _RANK, device=self._device)

        def shrink() -> Sequence[torch.Tensor]:
            return [lora_shrink(x, lora_a, ranks, batch)]

        def expand() -> Sequence[torch.Tensor]:
            ys = [x.new_zeros(num_tokens, width) for width in _WIDTHS]
            lora_expand(mid, lora_b, ranks, batch, ys)
            return ys

        return shrink if op == "shrink" else expand


def all_cases(device: torch.device) -> dict[tuple[str, str], Case]:
    """Return a case for every row of a table."""
    builder = _Builder(device)
    builds: dict[tuple[str, str], Callable[[], Case]] = {
        ("store_kv", "all"): builder.store,
        ("rms_norm", "narrow"): partial(builder.dense, 128),
        ("rms_norm", "wide"): partial(builder.dense, _HIDDEN),
        ("rms_norm", "widest"): partial(builder.dense, 16384),
        ("silu_and_mul", "all"): builder.gate,
        ("sample_tokens", "all"): builder.sample,
    }
    for op in ("shrink", "expand"):
        builds[f"{op}_rows", "few"] = partial(builder.lora, op, 1, 1)
        builds[f"{op}_rows", "many"] = partial(builder.lora, op, 128, 1)
        builds[f"{op}_tiles", "short"] = partial(builder.lora, op, 64, 33)
        builds[f"{op}_tiles", "long"] = partial(builder.lora, op, 4, 1024)
    for head_size in (16, 32, 64, 128, 256):
        name = str(head_size)
        builds["decode", name] = partial(builder.attention, "decode", head_size, 1)
        builds["prefill_short", name] = partial(builder.attention, "prefill", head_size, 8)
        builds["prefill_long", name] = partial(builder.attention, "prefill", head_size, 512)
        builds["decode_fp8", name] = partial(builder.attention, "decode", head_size, 1, fp8=True)
        builds["prefill_fp8", name] = partial(
            builder.attention, "prefill", head_size, 512, fp8=True
        )
    return {row: _lazy(build) for row, build in builds.items()}
