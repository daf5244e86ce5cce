"""Grouped matrix products, by JAX's own Pallas kernels (megablox), where they are right.

What they leave to the caller is done here: rows are padded to whole tiles, rows of nobody become zero, and float32 is
multiplied in several passes of bfloat16 rather than in one, which is a TPU's default. Their table of tiles is made
with a histogram in float32, which gives wrong tiles past 4096 of them (jax 0.10.2): `MOST_TILES`.
"""

from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from kpt_backend_tpu.tiles import MOST_TILES, Tile


class Groups(NamedTuple):
    """Rows of groups, padded to whole tiles.

    Attributes:
        sizes: `[groups]` int32, rows of each group.
        owned: `[rows, 1]` bool, whether a group owns a row, of those that are not padding.
        padding: how many rows are appended.
    """

    sizes: jax.Array
    owned: jax.Array
    padding: int


def groups_of(offsets: jax.Array, rows: int, tile: Tile) -> Groups:
    """Return what the kernels need of `offsets`, the end row of each group."""
    padding = -rows % tile.rows
    if (rows + padding) // tile.rows > MOST_TILES:
        raise ValueError(f"{rows} rows are more than {MOST_TILES} tiles of {tile.rows}")
    sizes = jnp.diff(offsets, prepend=jnp.zeros(1, offsets.dtype))
    return Groups(sizes, (jnp.arange(rows) < offsets[-1])[:, None], padding)


def _precision(dtype: jnp.dtype) -> str:
    """Return how products are made: Mosaic takes no other word than the default for bfloat16."""
    return "highest" if dtype == jnp.float32 else "default"


def product(
    x: jax.Array, weight: jax.Array, offsets: jax.Array, *, tile: Tile, transposed: bool = False, interpret: bool
) -> jax.Array:
    """Multiply each group's rows by its matrix.

    Args:
        x: `[rows, K]`, float32 or bfloat16.
        weight: `[groups, K, N]`, or `[groups, N, K]` if `transposed`.
        offsets: `[groups]` int32, the end row of each group.
        tile: of the kernel.
        transposed: the matrices are stored as output by input; they are not copied.
        interpret: run it without a TPU.

    Returns:
        `[rows, N]` of x's dtype, zero in rows that no group owns.
    """
    groups = groups_of(offsets, x.shape[0], tile)
    with jax.default_matmul_precision(_precision(x.dtype)):
        out = gmm(
            jnp.pad(x, ((0, groups.padding), (0, 0))),
            weight,
            groups.sizes,
            preferred_element_type=x.dtype,
            tiling=(tile.rows, tile.inner, tile.columns),
            transpose_rhs=transposed,
            interpret=interpret,
        )
    return jnp.where(groups.owned, out[: x.shape[0]], 0)


def weight_gradient(x: jax.Array, grad: jax.Array, offsets: jax.Array, *, tile: Tile, interpret: bool) -> jax.Array:
    """Multiply, for each group, its rows of `x` transposed by its rows of `grad`.

    Args:
        x: `[rows, K]`, float32 or bfloat16.
        grad: `[rows, N]` of the same dtype.
        offsets: `[groups]` int32, the end row of each group.
        tile: of the kernel.
        interpret: run it without a TPU.

    Returns:
        `[groups, K, N]` of x's dtype, zero for groups without rows.
    """
    groups = groups_of(offsets, x.shape[0], tile)
    pad = ((0, groups.padding), (0, 0))
    with jax.default_matmul_precision(_precision(x.dtype)):
        out: jax.Array = tgmm(
            jnp.pad(x, pad).T,
            jnp.pad(grad, pad),
            groups.sizes,
            preferred_element_type=x.dtype,
            tiling=(tile.rows, tile.inner, tile.columns),
            interpret=interpret,
        )
    return out
