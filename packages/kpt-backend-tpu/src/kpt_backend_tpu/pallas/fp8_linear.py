"""A linear layer with an 8-bit weight: a product by XLA of the weight that is widened to the dtype of `x`.

Every 8-bit number is one of bfloat16, so bfloat16 activations are multiplied in one pass, exactly, where a row or the
whole weight shares a scale. All else is multiplied in float32, in several passes.
"""

import jax
from jax import lax
from jax import numpy as jnp

#: Granularities whose scale multiplies the sums: one for a row of the weight, or for all.
_OUTSIDE = ("tensor", "row")


def _dot(one: jax.Array, other: jax.Array, over: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if one.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = (((over[0],), (over[1],)), ((), ()))
    found: jax.Array = lax.dot_general(one, other, contract, precision=precision, preferred_element_type=jnp.float32)
    return found


def _numbers(weight: jax.Array, scale: jax.Array, granularity: str) -> jax.Array:
    """Return the weight in float32, scaled block by block."""
    rows, inner = weight.shape
    height, _, width = granularity.partition("x")
    scale = jnp.repeat(jnp.repeat(scale, int(height), 0)[:rows], int(width), 1)[:, :inner]
    return weight.astype(jnp.float32) * scale


def forward(
    x: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array | None, *, granularity: str, interpret: bool
) -> jax.Array:
    """Compute `x @ (weight * scale).T + bias`, summed in float32 and rounded once.

    Args:
        x: `[M, K]` float32 or bfloat16.
        weight: `[N, K]` float8_e4m3fn or float8_e5m2.
        scale: float32, of the shape that `fp8.linear` names for the granularity.
        bias: `[N]`, or None.
        granularity: what shares a scale.
        interpret: as other kernels have it; there is nothing to interpret.
    """
    if granularity in _OUTSIDE:
        sums = _dot(x, weight.astype(x.dtype), (1, 1)) * scale
    else:
        sums = _dot(x.astype(jnp.float32), _numbers(weight, scale, granularity), (1, 1))
    sums = sums if bias is None else sums + bias.astype(jnp.float32)
    return sums.astype(x.dtype)


def backward(grad: jax.Array, weight: jax.Array, scale: jax.Array, *, granularity: str, interpret: bool) -> jax.Array:
    """Compute the gradient of `x`: `grad @ (weight * scale)`; arguments as `forward` has them."""
    if granularity == "tensor":
        return (_dot(grad, weight.astype(grad.dtype), (1, 0)) * scale).astype(grad.dtype)
    wide = grad.astype(jnp.float32)
    if granularity == "row":
        return _dot(wide * scale, weight.astype(jnp.float32), (1, 0)).astype(grad.dtype)
    return _dot(wide, _numbers(weight, scale, granularity), (1, 0)).astype(grad.dtype)
