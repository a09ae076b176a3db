"""The public ops: signature, shapes, checks and dispatch of each.

Every op runs on the device of its tensors (see ``kernels.backend``); ``backend=`` overrides the
choice. Checks look at shapes only, never at values, so that no op waits for the device.

Shape axes: T tokens, H query heads, Hkv key heads, D head size, P projections sharing one input.
Caches are of the activations' dtype, or float8_e4m3fn with ``scales``.
"""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, implementation
from kernels.checks import check_attention, check_lora, check_outputs, check_store, require
from kernels.metadata import AttentionBatch, KVScales, LoRABatch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``.

    x        [T, in]
    weight   [out, in]    same dtype as x
    bias     [out]
    returns  [T, out]     new tensor
    """
    require(x.shape[-1] == weight.shape[1], "linear", x, weight)
    result: torch.Tensor = implementation("linear", x.device.type, backend)(x, weight, bias)
    return result


def linear_multi(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    backend: Backend | None = None,
) -> list[torch.Tensor]:
    """Return `linear` of one input for each weight, such as q, k and v; one call on a CPU.

    x        [T, in]
    weights  P of [out_p, in]    same dtype as x
    biases   P of [out_p] or None
    returns  P of [T, out_p]     new tensors
    """
    if len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights, {len(biases)} biases")
    for weight in weights:
        require(x.shape[-1] == weight.shape[1], "linear_multi", x, weight)
    run = implementation("linear_multi", x.device.type, backend)
    results: list[torch.Tensor] = run(x, weights, biases)
    return results


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Rotate queries and keys by their positions, in place, as transformers' Llama does.

        x[t] = x[t] * cos[t] + concat(-upper half of x[t], lower half of x[t]) * sin[t]

    query     [T, H, D]      changed
    key       [T, Hkv, D]    changed
    cos, sin  [T, D]         same dtype
    """
    require(query.shape[::2] == cos.shape == sin.shape, "apply_rope", query, cos)
    require(key.shape[::2] == cos.shape, "apply_rope", key, cos)
    if query.shape[0]:
        implementation("apply_rope", query.device.type, backend)(query, key, cos, sin)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend | None = None
) -> torch.Tensor:
    """Scale each row of x to unit root mean square, then by `weight`, as LlamaRMSNorm does.

    x        [T, hidden]
    weight   [hidden]
    returns  [T, hidden]    new tensor
    """
    require(x.shape[-1:] == weight.shape, "rms_norm", x, weight)
    result: torch.Tensor = implementation("rms_norm", x.device.type, backend)(x, weight, eps)
    return result


def add_rms_norm(
    stream: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return `rms_norm` of the stream after ``stream += update``; the sum is rounded to its dtype.

    stream   [T, hidden]    changed
    update   [T, hidden]
    weight   [hidden]
    returns  [T, hidden]    new tensor
    """
    require(stream.shape == update.shape, "add_rms_norm", stream, update)
    require(stream.shape[-1:] == weight.shape, "add_rms_norm", stream, weight)
    run = implementation("add_rms_norm", stream.device.type, backend)
    result: torch.Tensor = run(stream, update, weight, eps)
    return result


def silu_and_mul(
    gate: torch.Tensor, up: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Return ``silu(gate) * up``; both [T, n]."""
    require(gate.shape == up.shape, "silu_and_mul", gate, up)
    result: torch.Tensor = implementation("silu_and_mul", gate.device.type, backend)(gate, up)
    return result


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KVScales | None = None,
    backend: Backend | None = None,
) -> None:
    """Write each token's key and value into the paged cache, in place.

    key, value                [T, Hkv, D]
    key_cache, value_cache    [num_blocks, block_size, Hkv, D]    changed
    slot_mapping              [T] int64    block * block_size + offset; -1 writes nothing
    scales                    changed: a vector's largest magnitude over 448, so that it is
                              quantised by itself whatever the others are
    """
    check_store(key, value, key_cache, value_cache, slot_mapping, scales)
    if key.shape[0]:
        run = implementation("store_kv", key.device.type, _with_scales(key, scales, backend))
        run(key, value, key_cache, value_cache, slot_mapping, **_options(scales))


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
    backend: Backend | None = None,
) -> None:
    """Do what `apply_rope` and `store_kv` do, in one launch where Triton runs.

    query     [T, H, D]      changed: rotated
    key       [T, Hkv, D]    undefined afterwards
    rotary    cos and sin, [T, D]
    """
    cos, sin = rotary
    if backend in (None, "cpu") and query.device.type == "cpu":
        apply_rope(query, key, cos, sin, backend=backend)
        store_kv(key, value, key_cache, value_cache, slot_mapping, scales=scales, backend=backend)
        return
    require(query.shape[::2] == cos.shape == sin.shape, "rope_and_store_kv", query, cos)
    check_store(key, value, key_cache, value_cache, slot_mapping, scales)
    if query.shape[0]:
        run = implementation("rope_and_store_kv", query.device.type, backend)
        caches = (key_cache, value_cache)
        run(query, key, value, rotary, *caches, slot_mapping, **_options(scales))


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
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend from the single new token of each decode to its whole context.

    query      [num_decodes, H, D]
    key_cache, value_cache    [num_blocks, block_size, Hkv, D]
    returns    [num_decodes, H, D]    new tensor; zeros where the context is empty

    `window` w limits a token to the last w positions including its own. `soft_cap` c bounds the
    scaled scores by ``c * tanh(score / c)``.
    """
    check_attention(query, key_cache, value_cache, scales, window)
    if query.shape[0] != batch.num_decodes:
        raise ValueError(f"{query.shape[0]} query rows for {batch.num_decodes} decodes")
    if not query.shape[0]:
        return torch.empty_like(query)
    run = implementation("paged_decode", query.device.type, _with_scales(query, scales, backend))
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, **_options(scales)}
    result: torch.Tensor = run(query, key_cache, value_cache, batch, **options)
    return result


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
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend causally from the tokens after the decodes; their keys are already in the cache.

    query      [T - num_decodes, H, D]    tokens of the sequences after the decodes
    returns    [T - num_decodes, H, D]    new tensor

    See `paged_decode` for the rest.
    """
    check_attention(query, key_cache, value_cache, scales, window)
    if not query.shape[0]:
        return torch.empty_like(query)
    run = implementation("paged_prefill", query.device.type, _with_scales(query, scales, backend))
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, **_options(scales)}
    result: torch.Tensor = run(query, key_cache, value_cache, batch, **options)
    return result


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend causally from every token of a mixed batch: `paged_decode` and `paged_prefill`.

    query      [T, H, D]
    returns    [T, H, D]    new tensor
    """
    split = batch.num_decodes
    parts = []
    for op, rows in ((paged_decode, query[:split]), (paged_prefill, query[split:])):
        if rows.shape[0]:
            parts.append(
                op(
                    rows,
                    key_cache,
                    value_cache,
                    batch,
                    scale=scale,
                    window=window,
                    soft_cap=soft_cap,
                    scales=scales,
                    backend=backend,
                )
            )
    if not parts:
        return torch.empty_like(query)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def lora_shrink(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    ranks: torch.Tensor,
    batch: LoRABatch,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Project each token onto its adapter's rank space, for every projection at once.

        mid[p, t] = lora_a[p, slot(t)] @ x[t]

    x          [T, in]
    lora_a     [P, slots, max_rank, in]     same dtype as x; rows past a slot's rank are never read
    ranks      [P, slots] int32
    returns    [P, T, max_active_rank] float32, new tensor. Undefined for tokens of the base model
               and past the adapter's rank.
    """
    check_lora(x, lora_a, ranks, batch)
    if not (x.shape[0] and batch.max_active_rank):
        shape = (lora_a.shape[0], x.shape[0], batch.max_active_rank)
        return x.new_empty(shape, dtype=torch.float32)
    run = implementation("lora_shrink", x.device.type, backend)
    result: torch.Tensor = run(x, lora_a, ranks, batch)
    return result


def lora_expand(
    mid: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
    *,
    backend: Backend | None = None,
) -> None:
    """Add each token's low-rank update to every projection's output, in place.

        ys[p][t] += mid[p, t] @ lora_b[p][slot(t)]
        ys[p][t] = ys[p][t] * scales[p][slot(t), 0] + scales[p][slot(t), 1]    with scales

    mid        [P, T, max_active_rank] float32, from `lora_shrink`
    lora_b     P of [slots, max_rank, out_p]    rows past a slot's rank are never read
    ranks      [P, slots] int32
    ys         P of [T, out_p]                  changed; rows of the base model are untouched
    scales     P of [slots or more, 2, out_p] float32    applied before the result is rounded, also
               where the rank is 0
    """
    check_outputs(mid.shape[0], lora_b, ys, batch, scales)
    if mid.shape[1] and (mid.shape[2] or scales is not None):
        run = implementation("lora_expand", mid.device.type, _with_scales(mid, scales, backend))
        run(mid, lora_b, ranks, batch, ys, *_tables(scales))


def lora_apply(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
    *,
    backend: Backend | None = None,
) -> None:
    """Add the adapters' updates for input x to ys, in place: `lora_shrink`, then `lora_expand`."""
    check_lora(x, lora_a, ranks, batch)
    check_outputs(lora_a.shape[0], lora_b, ys, batch, scales)
    if x.shape[0] and (batch.max_active_rank or scales is not None):
        run = implementation("lora_apply", x.device.type, _with_scales(x, scales, backend))
        run(x, lora_a, lora_b, ranks, batch, ys, *_tables(scales))


def sample_tokens(
    logits: torch.Tensor,
    params: torch.Tensor,
    seeds: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Choose a token for each row; nothing of it waits for the host.

    logits   [R, vocab] float32
    params   [R, 4] float32    temperature, top_k, top_p, min_p; 0, 0, 1 and 0 switch each off, and
             temperature 0 takes the most likely token
    seeds    [R] int64         the only source of a row's random numbers, in 0..2**62
    returns  [R] int64         -1 where the row has NaN, or no finite largest value

    Of equally likely tokens the first ones count as more likely. What is left after min_p, top_k
    and top_p, in this order, is drawn from: the largest of ``logits / temperature + Gumbel noise``.
    """
    require(params.shape == (logits.shape[0], 4), "sample_tokens", logits, params)
    require(seeds.shape == logits.shape[:1], "sample_tokens", logits, seeds)
    if not logits.shape[0]:
        return seeds.clone()
    run = implementation("sample_tokens", logits.device.type, backend)
    result: torch.Tensor = run(logits, params, seeds)
    return result


def _with_scales(x: torch.Tensor, scales: object | None, backend: Backend | None) -> Backend | None:
    """Return the backend: the C++ extension knows neither quantised caches nor scaled outputs."""
    return "torch" if scales is not None and x.device.type == "cpu" and not backend else backend


def _options(scales: KVScales | None) -> dict[str, KVScales]:
    return {} if scales is None else {"scales": scales}


def _tables(scales: Sequence[torch.Tensor] | None) -> tuple[Sequence[torch.Tensor], ...]:
    return () if scales is None else (scales,)
