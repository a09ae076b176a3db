"""Every op in plain torch: the specification that the other backends are tested against.

Written to be read, token by token and in float32 (float64 for float64 inputs), not to be fast.
``kernels.ops`` documents the shapes.
"""

from collections.abc import Sequence

import torch

from kernels.gumbel import gumbel_noise
from kernels.metadata import AttentionBatch, KVScales, LoRABatch

# The largest float8_e4m3fn.
_MAX_E4M3 = 448.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Widen to the dtype that sums are taken in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, rounded once."""
    y = _wide(x) @ _wide(weight).T
    return (y if bias is None else y + _wide(bias)).to(x.dtype)


def linear_multi(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return `linear` of one input for each weight."""
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def apply_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate by position, in place, rounded once."""
    for x in (query, key):
        lower, upper = _wide(x).chunk(2, dim=-1)
        turned = torch.cat([-upper, lower], dim=-1)
        x.copy_(_wide(x) * _wide(cos)[:, None] + turned * _wide(sin)[:, None])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * (x / rms(x))``; the quotient is rounded to x's dtype, as Llama does."""
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `rms_norm` of the stream after ``stream += update``, in place."""
    return rms_norm(stream.add_(update), weight, eps)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, rounded once."""
    return (torch.nn.functional.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """Write each token's key and value at its flat position; -1 writes nothing."""
    block_size = key_cache.shape[1]
    for token, position in enumerate(slot_mapping.tolist()):
        if position >= 0:
            block, offset = divmod(position, block_size)
            if scales is None:
                key_cache[block, offset] = key[token]
                value_cache[block, offset] = value[token]
                continue
            key_cache[block, offset], scales.key[block, offset] = quantise(key[token])
            value_cache[block, offset], scales.value[block, offset] = quantise(value[token])


def quantise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [..., D] in float8_e4m3fn, and the [...] float32 that it must be multiplied by."""
    largest = vectors.float().abs().amax(-1)
    # By a tensor: by a number, a GPU multiplies by the reciprocal, which rounds differently.
    scales = (largest / torch.full_like(largest, _MAX_E4M3)).masked_fill(largest == 0, 1.0)
    return (vectors.float() / scales[..., None]).to(torch.float8_e4m3fn), scales


def rope_and_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """Rotate, then write."""
    apply_rope(query, key, *rotary)
    store_kv(key, value, key_cache, value_cache, slot_mapping, scales=scales)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attend from the one new token of each decode."""
    out = torch.zeros_like(query)
    for sequence in range(batch.num_decodes):
        context_len = int(batch.context_lens[sequence])
        tables = (None, None) if scales is None else (scales.key, scales.value)
        keys = _read_cache(key_cache, tables[0], batch, sequence, context_len)
        values = _read_cache(value_cache, tables[1], batch, sequence, context_len)
        out[sequence] = _attend(query[sequence], keys, values, scale, window, soft_cap)
    return out


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attend from each token after the decodes to its sequence's context up to itself."""
    out = torch.zeros_like(query)
    starts = batch.query_starts.tolist()
    for sequence in range(batch.num_decodes, len(starts) - 1):
        context_len = int(batch.context_lens[sequence])
        tables = (None, None) if scales is None else (scales.key, scales.value)
        keys = _read_cache(key_cache, tables[0], batch, sequence, context_len)
        values = _read_cache(value_cache, tables[1], batch, sequence, context_len)
        num_new = starts[sequence + 1] - starts[sequence]
        for index in range(num_new):
            row = starts[sequence] - batch.num_decodes + index
            seen = context_len - num_new + index + 1
            out[row] = _attend(query[row], keys[:seen], values[:seen], scale, window, soft_cap)
    return out


def _read_cache(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    batch: AttentionBatch,
    sequence: int,
    context_len: int,
) -> torch.Tensor:
    """Return a sequence's keys or values as [context_len, heads, head_dim]."""
    num_blocks = -(-context_len // cache.shape[1])
    blocks = batch.block_tables[sequence, :num_blocks].long()
    if scales is None:
        return cache[blocks].flatten(0, 1)[:context_len]
    vectors = cache.view(torch.uint8)[blocks].view(cache.dtype).float() * scales[blocks][..., None]
    return vectors.flatten(0, 1)[:context_len]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attend from one token [H, D] to all given positions, or the last `window` of them."""
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    groups = query.shape[0] // keys.shape[1]
    wide = _wide(query)
    wide_keys = keys.to(wide.dtype).repeat_interleave(groups, dim=1)
    wide_values = values.to(wide.dtype).repeat_interleave(groups, dim=1)
    scores = torch.einsum("hd,shd->hs", wide, wide_keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("hs,shd->hd", scores.softmax(-1), wide_values).to(query.dtype)


def lora_shrink(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    """Project each token onto its adapter's rank space; zero past the adapter's rank."""
    mid = torch.zeros(
        lora_a.shape[0], x.shape[0], batch.max_active_rank, dtype=_wide(x).dtype, device=x.device
    )
    for token, slot in enumerate(batch.token_slots.tolist()):
        if slot >= 0:
            for projection, rank in enumerate(ranks[:, slot].tolist()):
                rows = lora_a[projection, slot, :rank]
                mid[projection, token, :rank] = _wide(rows) @ _wide(x[token])
    return mid


def lora_expand(
    mid: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """Add each token's update to its row of every projection's output, rounded once."""
    for token, slot in enumerate(batch.token_slots.tolist()):
        if slot >= 0:
            for projection, rank in enumerate(ranks[:, slot].tolist()):
                row = ys[projection][token]
                update = mid[projection, token, :rank] @ _wide(lora_b[projection][slot, :rank])
                sums = _wide(row) + update
                if scales is not None:
                    scale, shift = scales[projection][slot].to(sums.dtype)
                    sums = sums * scale + shift
                row.copy_(sums)


def lora_apply(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """Shrink, then expand."""
    lora_expand(lora_shrink(x, lora_a, ranks, batch), lora_b, ranks, batch, ys, scales)


def sample_tokens(logits: torch.Tensor, params: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sort each row, cut it, and take the largest of what is left plus its noise."""
    noise = gumbel_noise(seeds, logits.shape[1])
    chosen = [
        _sample_row(row, row_params, row_noise)
        for row, row_params, row_noise in zip(logits, params.tolist(), noise, strict=True)
    ]
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def _sample_row(logits: torch.Tensor, params: Sequence[float], noise: torch.Tensor) -> int:
    temperature, top_k, top_p, min_p = params
    if not logits.max().isfinite():
        return -1
    values, tokens = logits.double().sort(descending=True, stable=True)
    if temperature == 0:
        return int(tokens[0])
    scaled = (values - values[0]) / temperature
    probs = scaled.exp()
    probs[probs < min_p] = 0
    if top_k > 0:
        probs[int(top_k) :] = 0
    if top_p < 1:
        before = probs.cumsum(0) - probs
        probs[before >= top_p * probs.sum()] = 0
    noisy = (scaled + noise[tokens]).masked_fill(probs == 0, -torch.inf)
    return int(tokens[noisy.argmax()])
