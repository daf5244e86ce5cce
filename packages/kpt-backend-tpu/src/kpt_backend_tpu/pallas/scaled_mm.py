"""The product of two 8-bit matrices with scales: tiles are widened in VMEM, so that memory is read in 8 bits.

Every 8-bit number is one of bfloat16, so a product is exact but for the float32 sums. The matrix units of tpu7x that
multiply 8-bit numbers are not used: no chip has run this.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

#: Numbers along K that share a scale where not all do.
BLOCK = 128
#: Rows, columns and inner size of the largest tile.
_TILE = (512, 512, 512)
_form: Any = jax.ShapeDtypeStruct


def widened(codes: jax.Array) -> jax.Array:
    """Return 8-bit numbers in bfloat16, exactly."""
    return codes.astype(jnp.float32).astype(jnp.bfloat16)


def _kernel(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any, total: Any, *, inside: Any) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def product(one: jax.Array, other: jax.Array) -> jax.Array:
        contract = (((1,), (1,)), ((), ()))
        found: jax.Array = lax.dot_general(one, other, contract, preferred_element_type=jnp.float32)
        return found

    left, right = widened(a[...]), widened(b[...])
    if not any(inside):
        total[...] += product(left, right)
    else:
        pieces = a.shape[1] // BLOCK
        for piece in range(pieces):
            columns = slice(piece * BLOCK, (piece + 1) * BLOCK)
            found, place = product(left[:, columns], right[:, columns]), step * pieces + piece
            if inside[0]:
                lanes = lax.broadcasted_iota(jnp.int32, scale_a.shape, 1)
                found = found * jnp.where(lanes == place, scale_a[...], 0).sum(1, keepdims=True)
            if inside[1]:
                found = found * scale_b[pl.ds(place, 1), :]
            total[...] += found

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        sums = total[...] if inside[0] else total[...] * scale_a[...]
        sums = sums if inside[1] else sums * scale_b[...]
        out[...] = (sums + bias[...]).astype(out.dtype)


def _by_rows(scale: jax.Array, rows: int, granularity: str) -> jax.Array:
    """Return scales as `[rows, 1]`, or `[rows, blocks of K]`."""
    if granularity in ("tensor", "row"):
        return jnp.broadcast_to(scale.reshape(-1, 1), (rows, 1))
    return jnp.repeat(scale, BLOCK, 0)[:rows] if granularity == "128x128" else scale


def forward(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    bias: jax.Array | None,
    *,
    granularities: tuple[str, str],
    out_dtype: str,
    interpret: bool,
) -> jax.Array:
    """Compute `(a * scale_a) @ (b * scale_b) + bias`, summed in float32 and rounded once.

    Args:
        a: `[M, K]` float8_e4m3fn or float8_e5m2.
        b: `[K, N]`, likewise; the transposed view of `[N, K]` costs nothing.
        scale_a: float32, of the shape that `fp8.scaled_mm` names.
        scale_b: likewise; transposed as `b` is where it has two dimensions.
        bias: `[N]`, or None.
        granularities: what shares a scale of `a` and of `b.T`: `tensor`, `row`, `1x128` or `128x128`.
        out_dtype: `float32` or `bfloat16`.
        interpret: run the kernel without a TPU.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    right = b.T
    inside = tuple(each not in ("tensor", "row") for each in granularities)
    by_a = _by_rows(scale_a, rows, granularities[0])
    by_b = _by_rows(scale_b.T if scale_b.ndim == 2 else scale_b, columns, granularities[1]).T
    if over := -inner % BLOCK:  # what lies past the end of a tile may be NaN
        a, right = (jnp.pad(each, ((0, 0), (0, over))) for each in (a, right))
    depth = next(size for size in range(_TILE[2], 0, -BLOCK) if (inner + over) % size == 0)
    tall, wide = min(pl.cdiv(rows, 32) * 32, _TILE[0]), min(pl.cdiv(columns, BLOCK) * BLOCK, _TILE[1])
    added = jnp.zeros((1, columns), jnp.float32) if bias is None else bias.astype(jnp.float32)[None]
    found: jax.Array = pl.pallas_call(
        partial(_kernel, inside=inside),
        grid=(pl.cdiv(rows, tall), pl.cdiv(columns, wide), (inner + over) // depth),
        in_specs=[
            pl.BlockSpec((tall, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((wide, depth), lambda i, j, k: (j, k)),
            pl.BlockSpec((tall, by_a.shape[1]), lambda i, j, k: (i, 0)),
            pl.BlockSpec((by_b.shape[0], wide), lambda i, j, k: (0, j)),
            pl.BlockSpec((1, wide), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((tall, wide), lambda i, j, k: (i, j)),
        out_shape=_form((rows, columns), out_dtype),
        scratch_shapes=[pltpu.VMEM((tall, wide), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="scaled_mm",
        interpret=interpret,
    )(a, right, by_a, by_b, added)
    return found
