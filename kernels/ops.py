"""The public ops: signature, shapes, checks and dispatch of each.

Every op runs on the device of its tensors (see ``kernels.backend``); ``backend=`` overrides the
choice. Checks look at shapes only, never at values, so that no op waits for the device.

Shape axes: T tokens, H query heads, Hkv key heads, D head size, P projections sharing one input.
"""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, implementation
from kernels.metadata import AttentionBatch, LoRABatch


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
    _require(x.shape[-1] == weight.shape[1], "linear", x, weight)
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
        _require(x.shape[-1] == weight.shape[1], "linear_multi", x, weight)
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
    _require(query.shape[::2] == cos.shape == sin.shape, "apply_rope", query, cos)
    _require(key.shape[::2] == cos.shape, "apply_rope", key, cos)
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
    _require(x.shape[-1:] == weight.shape, "rms_norm", x, weight)
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
    _require(stream.shape == update.shape, "add_rms_norm", stream, update)
    _require(stream.shape[-1:] == weight.shape, "add_rms_norm", stream, weight)
    run = implementation("add_rms_norm", stream.device.type, backend)
    result: torch.Tensor = run(stream, update, weight, eps)
    return result


def silu_and_mul(
    gate: torch.Tensor, up: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Return ``silu(gate) * up``; both [T, n]."""
    _require(gate.shape == up.shape, "silu_and_mul", gate, up)
    result: torch.Tensor = implementation("silu_and_mul", gate.device.type, backend)(gate, up)
    return result


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Write each token's key and value into the paged cache, in place.

    key, value                [T, Hkv, D]
    key_cache, value_cache    [num_blocks, block_size, Hkv, D]    changed
    slot_mapping              [T] int64    block * block_size + offset; -1 writes nothing
    """
    _require(key.shape == value.shape, "store_kv", key, value)
    _require(key.shape[1:] == key_cache.shape[2:], "store_kv", key, key_cache)
    _require(key_cache.shape == value_cache.shape, "store_kv", key_cache, value_cache)
    _require(slot_mapping.shape == key.shape[:1], "store_kv", slot_mapping, key)
    if key.shape[0]:
        run = implementation("store_kv", key.device.type, backend)
        run(key, value, key_cache, value_cache, slot_mapping)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend from the single new token of each decode to its whole context.

    query      [num_decodes, H, D]
    key_cache, value_cache    [num_blocks, block_size, Hkv, D]
    returns    [num_decodes, H, D]    new tensor; zeros where the context is empty

    `window` w limits a token to the last w positions including its own. `soft_cap` c bounds the
    scaled scores by ``c * tanh(score / c)``.
    """
    _check_attention(query, key_cache, value_cache, window)
    if query.shape[0] != batch.num_decodes:
        raise ValueError(f"{query.shape[0]} query rows for {batch.num_decodes} decodes")
    if not query.shape[0]:
        return torch.empty_like(query)
    run = implementation("paged_decode", query.device.type, backend)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
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
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend causally from the tokens after the decodes; their keys are already in the cache.

    query      [T - num_decodes, H, D]    tokens of the sequences after the decodes
    returns    [T - num_decodes, H, D]    new tensor

    See `paged_decode` for the caches, `window` and `soft_cap`.
    """
    _check_attention(query, key_cache, value_cache, window)
    if not query.shape[0]:
        return torch.empty_like(query)
    run = implementation("paged_prefill", query.device.type, backend)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
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
    _check_lora(x, lora_a, ranks, batch)
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
    *,
    backend: Backend | None = None,
) -> None:
    """Add each token's low-rank update to every projection's output, in place.

        ys[p][t] += mid[p, t] @ lora_b[p][slot(t)]

    mid        [P, T, max_active_rank] float32, from `lora_shrink`
    lora_b     P of [slots, max_rank, out_p]    rows past a slot's rank are never read
    ranks      [P, slots] int32
    ys         P of [T, out_p]                  changed; rows of the base model are untouched
    """
    _check_outputs(mid.shape[0], lora_b, ys, batch)
    if mid.shape[1] and mid.shape[2]:
        implementation("lora_expand", mid.device.type, backend)(mid, lora_b, ranks, batch, ys)


def lora_apply(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    *,
    backend: Backend | None = None,
) -> None:
    """Add the adapters' updates for input x to ys, in place: `lora_shrink`, then `lora_expand`.

    On a CPU both are one call, so that the intermediate stays in cache; elsewhere they are one
    launch each.
    """
    _check_lora(x, lora_a, ranks, batch)
    _check_outputs(lora_a.shape[0], lora_b, ys, batch)
    if not (x.shape[0] and batch.max_active_rank):
        return
    if backend == "triton" or x.device.type != "cpu":
        mid = lora_shrink(x, lora_a, ranks, batch, backend=backend)
        lora_expand(mid, lora_b, ranks, batch, ys, backend=backend)
        return
    implementation("lora_apply", x.device.type, backend)(x, lora_a, lora_b, ranks, batch, ys)


def _check_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, window: int | None
) -> None:
    _require(key_cache.shape == value_cache.shape, "paged attention", key_cache, value_cache)
    _require(query.shape[2] == key_cache.shape[3], "paged attention", query, key_cache)
    _require(query.shape[1] % key_cache.shape[2] == 0, "paged attention", query, key_cache)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def _check_lora(
    x: torch.Tensor, lora_a: torch.Tensor, ranks: torch.Tensor, batch: LoRABatch
) -> None:
    _require(x.shape[1] == lora_a.shape[3], "lora", x, lora_a)
    _require(ranks.shape == lora_a.shape[:2], "lora", ranks, lora_a)
    _require(batch.token_slots.shape == x.shape[:1], "lora", batch.token_slots, x)


def _check_outputs(
    num_projections: int,
    lora_b: Sequence[torch.Tensor],
    ys: Sequence[torch.Tensor],
    batch: LoRABatch,
) -> None:
    if not len(lora_b) == len(ys) == num_projections:
        raise ValueError(
            f"{num_projections} projections, {len(lora_b)} lora_b tensors, {len(ys)} outputs"
        )
    for b, y in zip(lora_b, ys, strict=True):
        _require(y.shape[1] == b.shape[2], "lora", y, b)
        _require(batch.token_slots.shape == y.shape[:1], "lora", batch.token_slots, y)


def _require(condition: bool, op: str, left: torch.Tensor, right: torch.Tensor) -> None:
    if not condition:
        raise ValueError(f"{op}: shapes {tuple(left.shape)} and {tuple(right.shape)} do not fit")
