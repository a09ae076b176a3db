# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the two paged attention kernels share: reading pages and the online softmax.

Scores are kept in units of log 2, since the hardware's exponential is base 2. ``m``, ``l`` and
``acc`` are each row's running maximum, sum of weights and weighted sum of values.
"""

import math

import triton
import triton.language as tl

from kernels.fp8 import DECODED_UNIT, decode_e4m3


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return what `scores` multiplies by: before the cap's tanh, and after it."""
    if soft_cap is None:
        return scale * math.log2(math.e), 1.0
    return scale / soft_cap, soft_cap * math.log2(math.e)


@triton.jit
def vector_indices(
    block_table_ptr, positions, mask, kv_head, PAGE: tl.constexpr, KV_HEADS: tl.constexpr
):
    """Return which vectors of a cache are a head's of these positions; int64."""
    blocks = tl.load(block_table_ptr + positions // PAGE, mask=mask, other=0).to(tl.int64)
    return (blocks * PAGE + positions % PAGE) * KV_HEADS + kv_head


@triton.jit
def load_vectors(
    cache_ptr, scales_ptr, vectors, mask, dims, like, HEAD_SIZE: tl.constexpr, FP8: tl.constexpr
):
    """Return a cache's vectors [n, D] in the dtype of `like`, and the scales [n] left to apply."""
    offsets = vectors[:, None] * HEAD_SIZE + dims[None, :]
    values = tl.load(cache_ptr + offsets, mask=mask[:, None] & (dims < HEAD_SIZE)[None, :], other=0)
    if FP8:
        scales = tl.load(scales_ptr + vectors, mask=mask, other=0.0) * DECODED_UNIT
        return decode_e4m3(values).to(like.dtype), scales
    else:
        return values, tl.full([dims.shape[0]], 1.0, tl.float32)


@triton.jit
def scores(query, keys, factor, cap_factor, SOFT_CAP: tl.constexpr):
    """Return the scores of query [rows, D] and keys [n, D]: scaled, capped, in log 2 units.

    `factor` is a number, or one for each key.
    """
    result = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), whose limits at both ends are exact.
        result = cap_factor * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * result)))
    return result


@triton.jit
def update(new_scores, values, value_scales, m, l, acc, FP8: tl.constexpr):  # noqa: E741
    """Fold one block of scores [rows, n] and values [n, D] into the running softmax."""
    new_m = tl.maximum(m, tl.max(new_scores, 1))
    # A row that has seen no position yet has maximum -inf; -inf - -inf would be NaN.
    finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)
    weights = tl.exp2(new_scores - finite_m[:, None])
    decay = tl.exp2(m - finite_m)
    l = l * decay + tl.sum(weights, 1)  # noqa: E741
    if FP8:
        weights *= value_scales[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_m, l, acc
