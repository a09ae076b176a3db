"""Gumbel noise from a counter, in torch: what ``kernels.sample_tokens`` draws on a GPU.

Noise is a function of a row's seed and a token's id alone (Philox 4x32-10, arXiv:2010.09063 has a
survey of counter-based generators), so it depends neither on the batch nor on the device.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Below it, log(1 - v) loses the digits that the series keeps.
SERIES_BELOW = 1e-3


def gumbel_noise(seeds: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return noise [R, num_tokens] float64 for seeds [R] int64."""
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=seeds.device)
    bits = _philox(tokens[None, :], seeds[:, None] & _MASK, seeds[:, None] >> 32 & _MASK)
    uniform = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=1.0 - 2.0**-24).double()
    return -(-torch.log1p(-uniform)).log()


def _philox(counter: torch.Tensor, key: torch.Tensor, high_key: torch.Tensor) -> torch.Tensor:
    """Return the first of the four 32-bit words for counters (counter, 0, 0, 0)."""
    zero = torch.zeros_like(counter + key)
    words = [counter + zero, zero, zero, zero]
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(_MULTIPLIERS[0], words[0])
        high_b, low_b = _multiply(_MULTIPLIERS[1], words[2])
        words = [high_b ^ words[1] ^ key, low_b, high_a ^ words[3] ^ high_key, low_a]
        key, high_key = key + _KEY_STEPS[0] & _MASK, high_key + _KEY_STEPS[1] & _MASK
    return words[0]


def _multiply(left: int, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low word of a product of 32-bit words, in 64-bit integers."""
    upper, lower = (left >> 16) * right, (left & 0xFFFF) * right
    high = upper + (lower >> 16) >> 16
    return high, ((upper & 0xFFFF) << 16) + lower & _MASK
