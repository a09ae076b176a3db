# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""float8_e4m3fn in integer arithmetic, which every GPU has, whether or not it knows the format.

A vector is kept as codes and one float32 scale: its largest magnitude over 448, the format's
largest. Rounding is to the nearest, ties to even, as torch's conversion rounds.
"""

import triton
import triton.language as tl

# The format's largest value.
MAX_E4M3: tl.constexpr = tl.constexpr(448.0)
# `decode_e4m3` leaves out this factor: its callers multiply by a scale anyway.
DECODED_UNIT: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def vector_scales(magnitudes, not_a_number):
    """Return the scales [n] of vectors with these largest magnitudes; NaN where a NaN was."""
    largest = tl.full(magnitudes.shape, MAX_E4M3, tl.float32)
    scales = tl.where(magnitudes > 0.0, tl.div_rn(magnitudes, largest), 1.0)
    return tl.where(not_a_number, float("nan"), scales)


@triton.jit
def encode_e4m3(values):
    """Return the codes, as uint8, of float32 values of at most 448."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2**-6 on: 20 bits of the fraction are rounded off, and the exponent's bias is 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below, codes are multiples of 2**-9, which is the last place of a float32 at 2**14.
    subnormal = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal) & 0x7F
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """Return the values over 256, as float16: its exponent has one bit more, and all else fits."""
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
