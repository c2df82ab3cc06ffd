"""Float8 in integer arithmetic, for where Triton's own conversions are missing or inexact.

Both formats of torch are known by their mantissa bits: 3 is e4m3fn (bias 7, no infinity), 2 is e5m2
(bias 15). Ampere converts no e4m3, and the interpreter neither rounds to even nor to subnormals.
"""

import torch
import triton
import triton.language as tl

MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


@triton.jit
def decode(b_bits, MANTISSA: tl.constexpr):
    """Return float16 values of a uint8 tile, exactly."""
    b_bits = b_bits.to(tl.uint16)
    b_half = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << (10 - MANTISSA))
    b_value = b_half.to(tl.float16, bitcast=True)
    if MANTISSA == 3:
        # The exponent fields line up, their biases of 7 and 15 do not.
        b_value = tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b_value * 256.0)
    return b_value


@triton.jit
def encode(b_value, MANTISSA: tl.constexpr):
    """Return uint8 of a float32 tile: nearest, ties to even, finite values beyond the range saturate."""
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    # Added to a subnormal, this leaves its multiple of the smallest step in the low bits, rounded to even.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    b_sign = (b_value.to(tl.uint32, bitcast=True) >> 24) & 0x80
    b_size = tl.minimum(tl.abs(b_value), LARGEST)
    b_bits = b_size.to(tl.uint32, bitcast=True)
    b_odd = (b_bits >> (23 - MANTISSA)) & 1
    b_normal = ((b_bits + ((1 << (22 - MANTISSA)) - 1) + b_odd) >> (23 - MANTISSA)) - (
        (127 - BIAS) << MANTISSA
    )
    b_step = (b_size + MAGIC).to(tl.uint32, bitcast=True) & 0xFF
    b_code = tl.where(b_size < 2.0 ** (1 - BIAS), b_step, b_normal)
    b_code = tl.where(b_value != b_value, 0x7F, b_code)
    return (b_code | b_sign).to(tl.uint8)
