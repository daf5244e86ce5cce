"""Arithmetic that Triton's compiler and its interpreter must do alike: products of matrices and narrow results."""

import os

import triton
import triton.language as tl

#: Whether kernels run in Triton's interpreter, which has no arithmetic in bfloat16 or 8-bit numbers.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes"))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a @ b` in float32; PRECISION (`ieee`, `tf32`) matters for operands in float32 alone."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """A float32 value rounded to the nearest of `dtype`, to even in the middle; the interpreter would truncate."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(dtype)


@triton.jit
def half_of(code, FORMAT: tl.constexpr):
    """A code as float16, which has as many bits of exponent or more, about another bias."""
    SHIFT: tl.constexpr = 8 if FORMAT == "e5m2" else 8 if FORMAT == "e5m2fnuz" else 7
    size = (code & 0x7F).to(tl.uint16)
    bits = (size << SHIFT) | ((code & 0x80).to(tl.uint16) << 8)
    value = bits.to(tl.float16, bitcast=True)
    if FORMAT == "e4m3fn":
        return tl.where(size == 0x7F, float("nan"), value * 256.0).to(tl.float16)
    elif FORMAT == "e4m3fnuz":
        return tl.where(code == 0x80, float("nan"), value * 128.0).to(tl.float16)
    elif FORMAT == "e5m2fnuz":
        # Half of what float16 takes for infinite is less than its largest number.
        large = (bits - 0x400).to(tl.float16, bitcast=True)
        value = tl.where(size >= 0x7C, large, value * 0.5)
        return tl.where(code == 0x80, float("nan"), value).to(tl.float16)
    else:
        return value


@triton.jit
def widen(value, dtype: tl.constexpr):
    """An 8-bit value in a wider type, exactly; the interpreter takes NaN and infinity for numbers.

    Codes of float8_e4m3fn may be given as uint8, of float8_e5m2 as int8: then integers widen them.
    """
    if value.dtype.is_int_unsigned():
        return half_of(value, "e4m3fn").to(dtype)
    elif value.dtype.is_int_signed():
        return half_of(value.to(tl.uint8, bitcast=True), "e5m2").to(dtype)
    elif INTERPRETED and value.dtype.is_fp8():
        code = value.to(tl.uint8, bitcast=True)
        magnitude = code & 0x7F
        wide = value.to(tl.float32)
        if value.dtype == tl.float8e5:
            wide = tl.where(magnitude == 0x7C, tl.where(wide > 0, float("inf"), float("-inf")), wide)
            return tl.where(magnitude > 0x7C, float("nan"), wide).to(dtype)
        elif value.dtype == tl.float8e4nv:
            return tl.where(magnitude == 0x7F, float("nan"), wide).to(dtype)
        else:
            return tl.where(code == 0x80, float("nan"), wide).to(dtype)
    else:
        return value.to(dtype)
