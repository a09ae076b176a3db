# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Chooses a token for each row of logits without the host: Triton kernel and launcher.

One program takes a row, which its cache holds, and reads it again for each question: the largest
logit, how many or how much probability lies above a threshold, the largest noisy logit. Top-k and
top-p are thresholds found by bisection over the logits' bits, plus how many of the tokens that are
as likely as the threshold stay. So nothing is sorted. ``kernels.gumbel`` is the noise in torch.
"""

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.gumbel import SERIES_BELOW

_SERIES_BELOW: tl.constexpr = tl.constexpr(SERIES_BELOW)
_ALL: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_LOWEST: tl.constexpr = tl.constexpr(-(1 << 31))


@triton.jit
def _load(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    """Return a block's token ids and logits; -inf past the vocabulary."""
    tokens = start + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocab, other=float("-inf"))
    # Minus zero becomes zero, which has the same place in the order of bits.
    return tokens, logits + 0.0


@triton.jit
def _order(logits):
    """Return integers that are ordered as the logits are."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first_of_largest(values, tokens):
    """Return the largest value, and the first of its tokens."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, tokens, _ALL), 0)


@triton.jit
def _largest(logits_ptr, vocab, BLOCK: tl.constexpr):
    """Return the largest logit, its first token, and how many NaNs there are."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tokens = tl.full([BLOCK], _ALL, tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens, logits = _load(logits_ptr, start, vocab, BLOCK)
        wrong += (logits != logits).to(tl.int32)
        better = logits > best
        best = tl.where(better, logits, best)
        best_tokens = tl.where(better, tokens, best_tokens)
    largest, token = _first_of_largest(best, best_tokens)
    return largest, token, tl.sum(wrong, 0)


@triton.jit
def _probability(logits, best, temperature):
    """Return probabilities relative to the largest."""
    return tl.exp((logits - best) / temperature)


@triton.jit
def _above(logits_ptr, vocab, best, temperature, min_p, threshold, BLOCK: tl.constexpr):
    """Return how many tokens have at least the threshold's order, and their probability.

    Tokens below `min_p` are not counted.
    """
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens, logits = _load(logits_ptr, start, vocab, BLOCK)
        probability = _probability(logits, best, temperature)
        keep = (tokens < vocab) & (probability >= min_p) & (_order(logits) >= threshold)
        count += keep.to(tl.int32)
        mass += tl.where(keep, probability, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _middle(low, high):
    """Return the integer between two, which may be further apart than an int32 can say."""
    return (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)


@triton.jit
def _top_k(logits_ptr, vocab, best, temperature, min_p, top_k, BLOCK: tl.constexpr):
    """Return the order of the k-th largest logit, and how many tokens of just that order stay."""
    low = tl.full([], _LOWEST, tl.int32)
    high = _order(best) + 1
    ties = tl.full([], _ALL, tl.int32)
    total, _ = _above(logits_ptr, vocab, best, temperature, min_p, low, BLOCK)
    if total > top_k:
        ties = top_k
        middle = _middle(low, high)
        while middle > low:
            count, _ = _above(logits_ptr, vocab, best, temperature, min_p, middle, BLOCK)
            if count >= top_k:
                low = middle
            else:
                high = middle
                ties = top_k - count
            middle = _middle(low, high)
            if count == top_k:
                # All of this order and above are just as many as asked for.
                middle = low
                ties = tl.full([], _ALL, tl.int32)
    return low, ties


@triton.jit
def _top_p(
    logits_ptr, vocab, best, temperature, min_p, top_p, threshold, ties, BLOCK: tl.constexpr
):
    """Narrow a threshold and its ties to the fewest tokens with `top_p` of their probability."""
    _, above = _above(logits_ptr, vocab, best, temperature, min_p, threshold + 1, BLOCK)
    _, total = _above(logits_ptr, vocab, best, temperature, min_p, threshold, BLOCK)
    at_threshold = _probability(_logit(threshold), best, temperature)
    if ties < _ALL:
        total = above + ties.to(tl.float32) * at_threshold
    wanted = top_p * total
    low = threshold
    high = threshold + 1
    if above >= wanted:
        low = threshold + 1
        high = _order(best) + 1
        above = 0.0
    middle = _middle(low, high)
    while middle > low:
        _, mass = _above(logits_ptr, vocab, best, temperature, min_p, middle, BLOCK)
        if mass >= wanted:
            low = middle
        else:
            high = middle
            above = mass
        middle = _middle(low, high)
    each = tl.maximum(_probability(_logit(low), best, temperature), 1e-30)
    needed = tl.minimum(tl.maximum(tl.ceil((wanted - above) / each), 1.0), 1e9).to(tl.int32)
    return low, tl.where(low == threshold, tl.minimum(ties, needed), needed)


@triton.jit
def _logit(order):
    """Return the logit that has this order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(seed, tokens):
    """Return the noise of tokens; see `kernels.gumbel`."""
    bits = tl.randint(seed, tokens).to(tl.uint32, bitcast=True)
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333333333))
    return -tl.log(tl.where(uniform < _SERIES_BELOW, series, -tl.log(1.0 - uniform)))


@triton.jit
def _draw(logits_ptr, vocab, best, temperature, min_p, threshold, ties, seed, BLOCK: tl.constexpr):
    """Return the token of the largest noisy logit among those that stay."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK], _ALL, tl.int32)
    num_ties = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens, logits = _load(logits_ptr, start, vocab, BLOCK)
        order = _order(logits)
        allowed = (tokens < vocab) & (_probability(logits, best, temperature) >= min_p)
        tied = (allowed & (order == threshold)).to(tl.int32)
        place = num_ties + tl.cumsum(tied, 0)
        num_ties += tl.sum(tied, 0)
        keep = allowed & ((order > threshold) | ((tied > 0) & (place <= ties)))
        noisy = (logits - best) / temperature + _gumbel(seed, tokens)
        noisy = tl.where(keep, noisy, float("-inf"))
        better = noisy > largest
        largest = tl.where(better, noisy, largest)
        chosen = tl.where(better, tokens, chosen)
    _, token = _first_of_largest(largest, chosen)
    return token


@triton.jit
def _sample_tokens_kernel(
    logits_ptr, params_ptr, seeds_ptr, tokens_ptr, vocab, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    params_ptr += row * 4
    temperature = tl.load(params_ptr)
    top_k = tl.load(params_ptr + 1).to(tl.int32)
    top_p = tl.load(params_ptr + 2)
    min_p = tl.load(params_ptr + 3)

    best, token, wrong = _largest(logits_ptr, vocab, BLOCK)
    finite = (wrong == 0) & (tl.abs(best) < float("inf"))
    if finite & (temperature > 0.0):
        threshold = tl.full([], _LOWEST, tl.int32)
        ties = tl.full([], _ALL, tl.int32)
        if top_k > 0:
            threshold, ties = _top_k(logits_ptr, vocab, best, temperature, min_p, top_k, BLOCK)
        if top_p < 1.0:
            threshold, ties = _top_p(
                logits_ptr, vocab, best, temperature, min_p, top_p, threshold, ties, BLOCK
            )
        seed = tl.load(seeds_ptr + row)
        token = _draw(logits_ptr, vocab, best, temperature, min_p, threshold, ties, seed, BLOCK)

    tl.store(tokens_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample_tokens(logits: torch.Tensor, params: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Launch one program for a row."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not params.is_contiguous():
        raise ValueError("sample_tokens: logits must be float32 with contiguous rows")
    config = tuning.block("sample_tokens")
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _sample_tokens_kernel[(num_rows,)](
        logits,
        params,
        seeds,
        tokens,
        vocab,
        logits.stride(0),
        BLOCK=min(config.block, tuning.next_power_of_two(vocab)),
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
    return tokens
