"""The experts of a Mixture-of-Experts layer: sorting, two grouped products, the activation and the sum over choices.

All of it is one function of JAX, so XLA fuses what lies between the products. Matrices are multiplied as they are
stored: on a TPU a transposed view of all experts would be copied for each call.
"""

from functools import partial
from typing import NamedTuple

import jax
from jax import numpy as jnp

from kpt_backend_tpu.layouts import Layout
from kpt_backend_tpu.tiles import LANES, Tile, tile_of

from .activations import activate
from .grouped_mm import product, weight_gradient


class _Rows(NamedTuple):
    """Pairs of token and choice in the order of their experts.

    Attributes:
        order: `[pairs]`, sorted row `j` is pair `order[j]`.
        offsets: `[experts]` int32, the end row of each expert.
        experts: `[pairs]`, the expert of each row, of rows of nobody the last.
        owned: `[pairs, 1]` bool, whether an expert here owns a row.
    """

    order: jax.Array
    offsets: jax.Array
    experts: jax.Array
    owned: jax.Array


def _rows_of(order: jax.Array, offsets: jax.Array) -> _Rows:
    place = jnp.arange(order.shape[0], dtype=offsets.dtype)
    experts = jnp.minimum(jnp.searchsorted(offsets, place, side="right"), offsets.shape[0] - 1)
    return _Rows(order, offsets, experts, (place < offsets[-1])[:, None])


def _tile(rows: int, weight: jax.Array) -> Tile:
    """Return the tile of products by `weight`, whichever of its sizes is summed over: they are cut alike."""
    groups, inner, columns = weight.shape
    return tile_of(rows, groups, inner, columns, weight.dtype.itemsize)


def _times(
    x: jax.Array, weight: jax.Array, offsets: jax.Array, *, stored_out_by_in: bool, interpret: bool
) -> jax.Array:
    tile = _tile(x.shape[0], weight.mT if stored_out_by_in else weight)
    return product(x, weight, offsets, tile=tile, transposed=stored_out_by_in, interpret=interpret)


def _with_bias(rows: jax.Array, bias: jax.Array | None, of: _Rows) -> jax.Array:
    """Return rows in float32 with the biases of their experts."""
    wide = rows.astype(jnp.float32)
    return wide if bias is None else wide + bias[of.experts].astype(jnp.float32)


def _weights_of(top_k_weights: jax.Array, of: _Rows) -> jax.Array:
    weights = top_k_weights.reshape(-1, 1)[of.order].astype(jnp.float32)
    return jnp.where(of.owned, weights, 0)


def _sum_choices(rows: jax.Array, of: _Rows, tokens: int) -> jax.Array:
    """Gather each token's rows and sum them in float32, in the order of its choices."""
    return rows[jnp.argsort(of.order)].reshape(tokens, -1, rows.shape[1]).sum(1, dtype=jnp.float32)


def forward(
    x: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_proj_bias: jax.Array | None,
    down_proj_bias: jax.Array | None,
    *,
    layout: Layout,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute `moe.experts`.

    Args:
        x: `[tokens, hidden]`, float32 or bfloat16.
        top_k_index: `[tokens, top_k]` int32; what is no expert is the number of experts.
        top_k_weights: `[tokens, top_k]`.
        gate_up_proj: as the op has it.
        down_proj: likewise.
        gate_up_proj_bias: likewise, or None.
        down_proj_bias: likewise, or None.
        layout: of the matrices, and the activation.
        interpret: run the kernels without a TPU.

    Returns:
        The output `[tokens, hidden]`, and what the op saves: pre-activation, order (int32) and offsets (int32).
    """
    num_experts, (tokens, top_k) = gate_up_proj.shape[0], top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(flat[order], jnp.arange(num_experts, dtype=flat.dtype), side="right")
    of = _rows_of(order, ends.astype(jnp.int32))
    stored = {"stored_out_by_in": not layout.transposed, "interpret": interpret}
    h = _times(x[order // top_k], gate_up_proj, of.offsets, **stored)
    a = activate(layout.activation, _with_bias(h, gate_up_proj_bias, of)).astype(x.dtype)
    y = _with_bias(_times(a, down_proj, of.offsets, **stored), down_proj_bias, of)
    y = jnp.where(of.owned, y * _weights_of(top_k_weights, of), 0)
    return _sum_choices(y, of, tokens).astype(x.dtype), h, of.order, of.offsets


def backward(
    x: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_proj_bias: jax.Array | None,
    down_proj_bias: jax.Array | None,
    h: jax.Array,
    order: jax.Array,
    offsets: jax.Array,
    grad: jax.Array,
    *,
    needs: tuple[str, ...],
    layout: Layout,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Compute the gradients of `moe.experts` that `needs` names, in that order.

    The gradient of the routing weights is the product of an activation and its gradient (SonicMoE, arXiv:2512.14080).

    Args:
        x: as `forward` has it, and so the next ones.
        top_k_weights: likewise.
        gate_up_proj: likewise.
        down_proj: likewise.
        gate_up_proj_bias: likewise.
        down_proj_bias: likewise.
        h: what `forward` saved, and so the next two.
        order: likewise.
        offsets: likewise.
        grad: of the output.
        needs: names of the arguments whose gradients are wanted.
        layout: as `forward` has it.
        interpret: likewise.
    """
    tokens, top_k = top_k_weights.shape
    of = _rows_of(order, offsets)
    token = order // top_k
    weights, grad_y = _weights_of(top_k_weights, of), grad[token]
    # Through the down projection backwards its matrices are used the other way round.
    back = {"stored_out_by_in": layout.transposed, "interpret": interpret}
    grad_a = _times(grad_y, down_proj, offsets, **back).astype(jnp.float32)
    a, pull = jax.vjp(partial(activate, layout.activation), _with_bias(h, gate_up_proj_bias, of))
    found: dict[str, jax.Array] = {}
    if "top_k_weights" in needs:
        rows = (grad_a * a.astype(x.dtype)).sum(1)
        if down_proj_bias is not None:
            rows = rows + (grad_y.astype(jnp.float32) * down_proj_bias[of.experts]).sum(1)
        rows = jnp.where(of.owned[:, 0], rows, 0)
        of_pairs = rows[jnp.argsort(order)].reshape(top_k_weights.shape)
        found["top_k_weights"] = of_pairs.astype(top_k_weights.dtype)
    if "down_proj" in needs:
        weighted = (a * weights).astype(x.dtype)
        found["down_proj"] = _weight_gradient(weighted, grad_y, down_proj, offsets, layout, interpret)
    if "down_proj_bias" in needs:
        found["down_proj_bias"] = _sum_by_expert(grad_y * weights, of, interpret).astype(x.dtype)
    if {"x", "gate_up_proj", "gate_up_proj_bias"}.intersection(needs):
        (wide,) = pull(jnp.where(of.owned, grad_a * weights, 0))
        grad_h = wide.astype(x.dtype)
        if "gate_up_proj_bias" in needs:
            found["gate_up_proj_bias"] = _sum_by_expert(wide, of, interpret).astype(x.dtype)
        if "gate_up_proj" in needs:
            found["gate_up_proj"] = _weight_gradient(x[token], grad_h, gate_up_proj, offsets, layout, interpret)
        if "x" in needs:
            found["x"] = _sum_choices(_times(grad_h, gate_up_proj, offsets, **back), of, tokens).astype(x.dtype)
    return tuple(found[name] for name in needs)


def _weight_gradient(
    inputs: jax.Array, grad: jax.Array, weight: jax.Array, offsets: jax.Array, layout: Layout, interpret: bool
) -> jax.Array:
    """Return the gradient of matrices as they are stored."""
    x, other = (inputs, grad) if layout.transposed else (grad, inputs)
    return weight_gradient(x, other, offsets, tile=_tile(x.shape[0], weight), interpret=interpret)


def _sum_by_expert(rows: jax.Array, of: _Rows, interpret: bool) -> jax.Array:
    """Sum the rows of each expert, in float32: by a product with ones, since TPUs scatter slowly."""
    ones = jnp.ones((rows.shape[0], LANES), rows.dtype)
    tile = tile_of(rows.shape[0], of.offsets.shape[0], LANES, rows.shape[1], rows.dtype.itemsize)
    return weight_gradient(ones, rows, of.offsets, tile=tile, interpret=interpret)[:, 0]
