"""float8 in pages, from float32 and back. Pages of uint8 hold e4m3fn too: for chips that have it not, the codes are
made and read here (OCP 8-bit floating point specification: 4 bits of exponent, bias 7, 3 of mantissa, no infinity).
"""

# ruff: noqa: N803, SIM300 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def narrow(value, KIND: tl.constexpr):
    """float32 as pages of KIND hold it: rounded to nearest even; clamped, chips differ in what they make of more."""
    limit = 240.0 if KIND == tl.float8e4b8 else 57344.0 if KIND == tl.float8e5 else 448.0
    value = tl.clamp(value, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return code_of(value) if KIND == tl.uint8 else value.to(KIND)


@triton.jit
def widen(stored, KIND: tl.constexpr):
    """What pages hold as KIND, exactly."""
    return value_of(stored).to(KIND) if stored.dtype == tl.uint8 else stored.to(KIND)


@triton.jit
def code_of(value):
    """The e4m3fn code of a float32 of -448 to 448, or of a NaN."""
    bits = value.to(tl.int32, bitcast=True)
    size = tl.where(value == value, bits & 0x7FFFFFFF, 0)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count multiples of 2^-9, which is the last place of what is a little more than 2^14.
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (tl.where(value == value, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def value_of(code):
    """The float32 of an e4m3fn code."""
    size = code.to(tl.int32) & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)
