"""Every op as a few large torch calls: the CPU path where no compiler was at hand.

Sums are taken in float32, as in ``kernels.reference``. May read metadata on the host, so it is not
meant for a GPU's attention or LoRA; the small dense ops serve every device.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from kernels.gumbel import gumbel_noise
from kernels.metadata import AttentionBatch, KVScales, LoRABatch
from kernels.reference import quantise

# Rows of queries that attend at once: bounds the score matrix for long prompts, and lets causal
# attention skip the keys that none of the rows sees.
_QUERY_CHUNK = 128


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``."""
    return functional.linear(x, weight, bias)


def linear_multi(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return `linear` of one input for each weight."""
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def apply_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate by position, in place, rounded after every step as transformers' own code."""
    for x in (query, key):
        lower, upper = x.chunk(2, dim=-1)
        turned = torch.cat([-upper, lower], dim=-1)
        x.mul_(cos[:, None]).add_(turned.mul_(sin[:, None]))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * (x / rms(x))``; the quotient is rounded to x's dtype, as Llama does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `rms_norm` of the stream after ``stream += update``, in place."""
    return rms_norm(stream.add_(update), weight, eps)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, rounded once."""
    return functional.silu(gate.float()).mul_(up).to(gate.dtype)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KVScales | None = None,
) -> None:
    """Scatter keys and values to their flat positions; -1 writes nothing."""
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    positions = slot_mapping[tokens]
    if scales is None:
        key_cache.flatten(0, 1).index_copy_(0, positions, key[tokens])
        value_cache.flatten(0, 1).index_copy_(0, positions, value[tokens])
        return
    for vectors, cache, table in (
        (key, key_cache, scales.key),
        (value, value_cache, scales.value),
    ):
        codes, found = quantise(vectors[tokens])
        # Indexing knows no eight-bit floats.
        cache.view(torch.uint8).flatten(0, 1)[positions] = codes.view(torch.uint8)
        table.flatten(0, 1)[positions] = found


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
    """Gather every decode's context, padded to the longest, and attend with one masked softmax."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    context_lens = batch.context_lens[: batch.num_decodes, None].long()
    starts = (context_lens - window).clamp_(min=0) if window is not None else 0 * context_lens
    first_blocks = starts // block_size
    num_blocks = int((-(-context_lens // block_size) - first_blocks).max())

    columns = first_blocks + torch.arange(num_blocks, device=query.device)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
    visible = (positions >= starts) & (positions < context_lens)
    # Table entries past the context are undefined: read block 0 instead, its positions are hidden.
    used = columns * block_size < context_lens
    columns = columns.where(used, 0).clamp_(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[: batch.num_decodes].long().gather(1, columns).where(used, 0)

    key_scales, value_scales = (None, None) if scales is None else (scales.key, scales.value)
    keys = _read(key_cache, key_scales, blocks).flatten(1, 2)
    values = _read(value_cache, value_scales, blocks).flatten(1, 2)
    hidden = ~visible
    values.masked_fill_(hidden[:, :, None, None], 0.0)
    head_size = query.shape[2]
    grouped = query.float().reshape(batch.num_decodes, num_kv_heads, -1, head_size)
    scores = _cap(grouped @ keys.permute(0, 2, 3, 1) * scale, soft_cap)
    scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
    weights = scores.softmax(-1).masked_fill_((context_lens == 0)[:, :, None, None], 0.0)
    return (weights @ values.transpose(1, 2)).flatten(1, 2).to(query.dtype)


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
    """Gather each sequence's context once, then attend chunk by chunk of its queries."""
    out = torch.empty_like(query)
    block_size = key_cache.shape[1]
    key_scales, value_scales = (None, None) if scales is None else (scales.key, scales.value)
    starts = batch.query_starts.tolist()
    for sequence in range(batch.num_decodes, len(starts) - 1):
        context_len = int(batch.context_lens[sequence])
        blocks = batch.block_tables[sequence, : -(-context_len // block_size)].long()
        keys = _read(key_cache, key_scales, blocks).flatten(0, 1)[:context_len].permute(1, 2, 0)
        values = _read(value_cache, value_scales, blocks).flatten(0, 1)[:context_len]
        values = values.transpose(0, 1)
        start, end = (bound - batch.num_decodes for bound in starts[sequence : sequence + 2])
        for first in range(start, end, _QUERY_CHUNK):
            last = min(first + _QUERY_CHUNK, end)
            high = context_len - (end - last)
            low = 0 if window is None else max(0, high - (last - first) - window + 1)
            positions = torch.arange(high - (last - first), high, device=query.device)
            hidden = _hidden(positions, low, high, window)
            out[first:last] = _attend(
                query[first:last], keys[..., low:high], values[:, low:high], hidden, scale, soft_cap
            )
    return out


def _read(cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """Gather blocks [...] of a cache as float32 [..., block_size, Hkv, D]."""
    if scales is None:
        return cache[blocks].float()
    codes = cache.view(torch.uint8)[blocks].view(cache.dtype)
    return codes.float().mul_(scales[blocks][..., None])


def _hidden(positions: torch.Tensor, low: int, high: int, window: int | None) -> torch.Tensor:
    """Return which key positions low..high are not seen from each query position."""
    seen = torch.arange(low, high, device=positions.device)
    hidden = seen > positions[:, None]
    return hidden if window is None else hidden | (seen <= positions[:, None] - window)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attend from rows [n, H, D] to keys [Hkv, D, s] and values [Hkv, s, D] of one sequence."""
    num_rows, num_heads, head_size = query.shape
    num_kv_heads, groups = keys.shape[0], num_heads // keys.shape[0]
    grouped = query.float().reshape(num_rows, num_kv_heads, groups, head_size).permute(1, 2, 0, 3)
    scores = _cap(grouped.flatten(1, 2) @ keys * scale, soft_cap)
    scores = scores.view(num_kv_heads, groups, num_rows, -1)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    mixed = (weights.flatten(1, 2) @ values).view(num_kv_heads, groups, num_rows, head_size)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)


def _cap(scores: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    return scores if soft_cap is None else torch.tanh_(scores.div_(soft_cap)).mul_(soft_cap)


def lora_shrink(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> torch.Tensor:
    """Project the tokens of each adapter with one product per projection."""
    mid = x.new_zeros(lora_a.shape[0], x.shape[0], batch.max_active_rank, dtype=torch.float32)
    for slot, tokens in _tokens_by_slot(batch):
        rows = x[tokens].float()
        for projection, rank in enumerate(ranks[:, slot].tolist()):
            if rank:
                weight = lora_a[projection, slot, :rank].float()
                mid[projection, tokens, :rank] = rows @ weight.T
    return mid


def lora_expand(
    mid: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """Add the updates of each adapter's tokens with one product per projection."""
    for slot, tokens in _tokens_by_slot(batch):
        for projection, rank in enumerate(ranks[:, slot].tolist()):
            if not rank and scales is None:
                continue
            weight = lora_b[projection][slot, :rank].float()
            y = ys[projection]
            sums = (mid[projection, tokens, :rank] @ weight).add_(y[tokens])
            if scales is not None:
                scale, shift = scales[projection][slot]
                sums = torch.addcmul(shift, sums, scale)
            y[tokens] = sums.to(y.dtype)


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
    """Sort all rows, cut them, and take the largest of what is left plus its noise."""
    values, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    temperature, top_k, top_p, min_p = params.double()[:, :, None].unbind(1)
    is_greedy = temperature == 0
    scaled = (values - values[:, :1]) / temperature.masked_fill(is_greedy, 1)
    probs = scaled.exp()
    probs = probs.masked_fill(probs < min_p, 0)
    places = torch.arange(logits.shape[1], device=logits.device)
    probs = probs.masked_fill((places >= top_k) & (top_k > 0), 0)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= top_p * probs.sum(-1, keepdim=True)) & (top_p < 1), 0)
    noisy = scaled + gumbel_noise(seeds, logits.shape[1]).gather(1, tokens)
    best = noisy.masked_fill(probs == 0, -torch.inf).argmax(-1, keepdim=True)
    chosen = tokens.gather(1, best.masked_fill(is_greedy, 0)).squeeze(1)
    return chosen.masked_fill(~logits.amax(-1).isfinite(), -1)


def _tokens_by_slot(batch: LoRABatch) -> Iterator[tuple[int, slice | torch.Tensor]]:
    """Yield each active slot with its tokens: a slice where they are neighbours, else indices."""
    tokens_of: dict[int, list[int]] = {}
    for token, slot in enumerate(batch.token_slots.tolist()):
        if slot >= 0:
            tokens_of.setdefault(slot, []).append(token)
    for slot, tokens in tokens_of.items():
        if tokens[-1] - tokens[0] + 1 == len(tokens):
            yield slot, slice(tokens[0], tokens[-1] + 1)
        else:
            yield slot, torch.tensor(tokens, device=batch.token_slots.device)
