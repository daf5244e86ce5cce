"""Quantising to 8 bits in one reading: largest magnitudes, scales and codes of rows or blocks of 128.

Every bit is that of the op's reference where JAX interprets it. A TPU, which none of this has run on, has no denormal
numbers, and XLA multiplies by reciprocals there as it does on CPUs: so quotients are corrected by what they leave, and
codes and denormal numbers are made of integers.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

#: Numbers along a row that share a scale, and rows that do, of blocks.
BLOCK = 128
#: Bytes of a tile's float32 numbers, about.
_BYTES = 1 << 19
_LEAST = 2.0**-126
#: Bits of the mantissa, the bias of the exponent, and the largest number, which is 1.75 times this power of two.
_FORMS = {"float8_e4m3fn": (3, 7, 8), "float8_e5m2": (2, 15, 15)}
_EXPONENT, _MANTISSA, _ONE = 0x7F800000, 0x7FFFFF, 0x3F800000
_form: Any = jax.ShapeDtypeStruct


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two numbers of 12 bits and a sign that sum to `x`."""
    high = _number(_bits(x) & ~0xFFF)
    return high, x - high


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    """Return the quotient, rounded to nearest, where `by` is between 1 and 2; of nothing denormal but zero."""
    near = x / by
    product = near * by
    # What the product lost, exactly (Dekker 1971): products of halves aren't rounded.
    (high, low), (top, rest) = _halves(near), _halves(by)
    lost = ((high * top - product) + high * rest + low * top) + low * rest
    better = near + ((x - product) - lost) / by
    return jnp.where(better == better, better, near)  # of infinities


def _codes(x: jax.Array, scale: jax.Array, format: str) -> jax.Array:
    """Return the codes of float32 numbers by their scale, rounded to nearest even and saturated, int32."""
    mantissa, bias, power = _FORMS[format]
    bits, by = _bits(x), _bits(scale)
    unit = _number((254 << 23) - (by & _EXPONENT))  # one over the scale's power of two
    tiny = (bits & _MANTISSA).astype(jnp.float32) * _number(jnp.maximum((105 << 23) - (by & _EXPONENT), 0))
    size = jnp.where(bits & _EXPONENT == 0, tiny, _number(bits & 0x7FFFFFFF) * unit)
    size = _divided(size, _number((by & _MANTISSA) | _ONE))
    size = jnp.where(size == size, jnp.minimum(size, 1.75 * 2.0**power), jnp.nan)
    rounded, shift = _bits(size), 23 - mantissa
    normal = (rounded + ((1 << (shift - 1)) - 1) + ((rounded >> shift) & 1)) >> shift
    # Added to this, a number loses what is below the format's least: float32 rounds it as it should be.
    anchor = 2.0 ** (23 + 1 - bias - mantissa)
    small = _bits(size + anchor) - _bits(jnp.full_like(size, anchor))
    code = jnp.where(size < 2.0 ** (1 - bias), small, normal - ((127 - bias) << mantissa))
    return jnp.where(size == size, code | ((bits >> 24) & 0x80), 0x7F)


def _scale(largest: jax.Array, format: str, rounding: str) -> jax.Array:
    """Return the scale of magnitudes whose largest has these bits."""
    power = (largest & _EXPONENT) - (_FORMS[format][2] << 23)
    part = _divided(_number((largest & _MANTISSA) | _ONE), jnp.full(largest.shape, 1.75, jnp.float32))
    scale = jnp.maximum(jnp.where(power > 0, part * _number(power), 0.0), _LEAST)
    if rounding == "up":
        scale = _number((_bits(scale) + _MANTISSA) & _EXPONENT)
    return jnp.where(largest == 0, 1.0, scale)


def _magnitudes(x: jax.Array) -> jax.Array:
    """Return the bits of magnitudes, which are ordered as these are; 0 for what is not finite."""
    bits = _bits(x) & 0x7FFFFFFF
    return jnp.where(bits < _EXPONENT, bits, 0)


def _piece(place: Any) -> Any:
    return pl.ds(pl.multiple_of(place * BLOCK, BLOCK), BLOCK)


def _of_rows(x: Any, codes: Any, scale: Any, *, format: str, rounding: str) -> None:
    pieces = x.shape[1] // BLOCK

    def larger(place: Any, found: jax.Array) -> jax.Array:
        return jnp.maximum(found, _magnitudes(x[:, _piece(place)].astype(jnp.float32)))

    amax = lax.fori_loop(0, pieces, larger, jnp.zeros((x.shape[0], BLOCK), jnp.int32)).max(1, keepdims=True)
    own = _scale(amax, format, rounding)

    def write(place: Any, none: None) -> None:
        some = _piece(place)
        codes[:, some] = _codes(x[:, some].astype(jnp.float32), own, format).astype(jnp.uint8)

    lax.fori_loop(0, pieces, write, None)
    scale[...] = own


def _of_blocks(x: Any, codes: Any, scale: Any, *, format: str, rounding: str, rows: int | None) -> None:
    lanes = lax.broadcasted_iota(jnp.int32, scale.shape[-2:], 1)
    first = pl.program_id(0) * BLOCK

    def block(place: Any, scales: jax.Array) -> jax.Array:
        some = _piece(place)
        numbers = x[:, some].astype(jnp.float32)
        sizes = _magnitudes(numbers)
        if rows is None:
            amax = sizes.max(1, keepdims=True)
        else:  # square; past the last row may be anything
            row = first + lax.broadcasted_iota(jnp.int32, sizes.shape, 0)
            amax = jnp.where(row < rows, sizes, 0).max(keepdims=True)
        own = _scale(amax, format, rounding)
        codes[:, some] = _codes(numbers, own, format).astype(jnp.uint8)
        return jnp.where(lanes == place, own, scales)

    found = lax.fori_loop(0, x.shape[1] // BLOCK, block, jnp.ones(lanes.shape, jnp.float32))
    scale[...] = found.reshape(scale.shape)


def forward(
    x: jax.Array, *, format: str, granularity: str, rounding: str, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Quantise; return the codes and the float32 scale, as `fp8.quantize` has them.

    Args:
        x: `[M, K]` float32 or bfloat16.
        format: `float8_e4m3fn` or `float8_e5m2`.
        granularity: `tensor`, `row`, `1x128` or `128x128`.
        rounding: of the scale: `none` or `up`.
        interpret: run the kernel without a TPU.
    """
    rows, inner = x.shape
    how: dict[str, Any] = {"format": format, "rounding": rounding}
    if granularity == "tensor":  # by XLA alone: all is read before anything can be written
        wide = x.astype(jnp.float32)
        own = _scale(_magnitudes(wide).max(keepdims=True), format, rounding)
        codes = _codes(wide, own, format).astype(jnp.uint8)
        return lax.bitcast_convert_type(codes, jnp.dtype(format)), own.reshape(())
    over = -inner % BLOCK
    x = jnp.pad(x, ((0, 0), (0, over))) if over else x
    whole, blocks = inner + over, pl.cdiv(inner, BLOCK)
    tall = BLOCK
    if granularity != "128x128":
        tall = min(max(_BYTES // (4 * whole) // 32, 1) * 32, pl.cdiv(rows, 32) * 32, tall)
    strips = pl.cdiv(rows, tall)
    if granularity == "row":
        kernel, block = partial(_of_rows, **how), pl.BlockSpec((tall, 1), lambda i: (i, 0))
        scale: tuple[int, ...] = (rows, 1)
    elif granularity == "1x128":
        kernel, scale = partial(_of_blocks, **how, rows=None), (rows, blocks)
        block = pl.BlockSpec((tall, blocks), lambda i: (i, 0))
    else:
        kernel, scale = partial(_of_blocks, **how, rows=rows), (strips, 1, blocks)
        block = pl.BlockSpec((1, 1, blocks), lambda i: (i, 0, 0))
    strip = pl.BlockSpec((tall, whole), lambda i: (i, 0))
    codes, scales = pl.pallas_call(
        kernel,
        grid=(strips,),
        in_specs=[strip],
        out_specs=(strip, block),
        out_shape=(_form((rows, whole), jnp.uint8), _form(scale, jnp.float32)),
        name="quantize",
        interpret=interpret,
    )(x)
    codes = lax.bitcast_convert_type(codes[:, :inner] if over else codes, jnp.dtype(format))
    return codes, scales.reshape((rows,) if granularity == "row" else (-1, blocks))
