"""Choosing each token's experts and weighing them, in one kernel; the gradient of the weights by XLA."""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from kpt_backend_tpu.layouts import Choice

#: Scores of a tile: what is kept of so many fits in registers, or nearly.
SCORES = 128 * 128
_form: Any = jax.ShapeDtypeStruct


def _scored(x: jax.Array, score: str) -> jax.Array:
    if score == "softmax":
        raised = jnp.exp(x - x.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)
    if score == "sigmoid":
        raised = jnp.exp(-jnp.abs(x))
        return jnp.where(x < 0, raised, 1.0) / (1.0 + raised)
    return x


def _first(found: jax.Array, columns: jax.Array) -> jax.Array:
    """Return the first column where it is so, `[rows, 1]`; the number of columns where there is none."""
    return jnp.where(found, columns, found.shape[1]).min(1, keepdims=True)


def _inside(key: jax.Array, columns: jax.Array, choice: Choice, by_two: bool) -> jax.Array:
    """Return which experts are in a token's best groups: a column of each group is made, then all are compared."""
    size = key.shape[1] // choice.num_groups
    values = []
    for group in range(choice.num_groups):
        own = (columns >= group * size) & (columns < (group + 1) * size)
        tile = jnp.where(own, key, -jnp.inf)
        best = tile.max(1, keepdims=True)
        if by_two and size > 1:
            rest = jnp.where(columns == _first(tile == best, columns), -jnp.inf, tile)
            best = best + rest.max(1, keepdims=True)
            best = jnp.where(best != best, jnp.inf, best)  # inf, which stands for NaN, and -inf
        values.append(best)
    inside = columns < 0
    for group, value in enumerate(values):
        ahead = jnp.zeros_like(value)
        for other, rival in enumerate(values):
            beats = rival >= value if other < group else rival > value
            ahead += jnp.where(beats & (other != group), 1.0, 0.0)
        own = (columns >= group * size) & (columns < (group + 1) * size)
        inside |= own & (ahead < choice.top_groups)
    return inside


def _kernel(logits: Any, bias: Any, weights: Any, index: Any, *, choice: Choice, biased: bool) -> None:
    x = logits[...].astype(jnp.float32)
    scores = _scored(x, choice.score)
    columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    key = scores + bias[...] if biased else scores
    key = jnp.where(key != key, jnp.inf, key)  # NaN is the highest, as in torch.topk
    left = columns >= 0
    if choice.top_groups < choice.num_groups:
        left = _inside(key, columns, choice, biased)
    places = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    chosen, weight = jnp.zeros(weights.shape, jnp.int32), jnp.zeros(weights.shape, jnp.float32)
    for place in range(choice.top_k):
        most = jnp.where(left, key, -jnp.inf).max(1, keepdims=True)
        best = _first(left & (key == most), columns)
        hit = columns == best
        left &= ~hit
        chosen = jnp.where(places == place, best, chosen)
        weight = jnp.where(places == place, jnp.where(hit, scores, 0).sum(1, keepdims=True), weight)
    if choice.score == "softmax_after":
        weight = _scored(weight, "softmax")
    if choice.renormalize:
        weight = weight / (weight.sum(1, keepdims=True) + 1e-20)
    weights[...] = weight * choice.scale
    index[...] = chosen


def forward(
    logits: jax.Array, bias: jax.Array | None, *, choice: Choice, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Choose experts; return weights `[T, top_k]` float32 and ids `[T, top_k]` int32.

    Args:
        logits: `[T, E]` float32 or bfloat16.
        bias: `[E]` float32, added where experts are chosen, or None.
        choice: how.
        interpret: run the kernel without a TPU.
    """
    tokens, experts = logits.shape
    rows = min(max(SCORES // (pl.cdiv(experts, 128) * 1024), 1), pl.cdiv(tokens, 8)) * 8
    added = jnp.zeros((1, experts), jnp.float32) if bias is None else bias[None]
    shape = (tokens, choice.top_k)
    block = pl.BlockSpec((rows, choice.top_k), lambda tile: (tile, 0))
    found: tuple[jax.Array, jax.Array] = pl.pallas_call(
        partial(_kernel, choice=choice, biased=bias is not None),
        grid=(pl.cdiv(tokens, rows),),
        in_specs=[pl.BlockSpec((rows, experts), lambda tile: (tile, 0)), pl.BlockSpec((1, experts), lambda _: (0, 0))],
        out_specs=(block, block),
        out_shape=(_form(shape, jnp.float32), _form(shape, jnp.int32)),
        name="top_k_gating",
        interpret=interpret,
    )(logits, added)
    return found


def backward(logits: jax.Array, index: jax.Array, grad: jax.Array, *, choice: Choice, interpret: bool) -> jax.Array:
    """Return the gradient of the logits, `[T, E]`, by XLA.

    Args:
        logits: as `forward` has them.
        index: `[T, top_k]` int32.
        grad: `[T, top_k]` float32, of the weights.
        choice: how.
        interpret: as other kernels have it; there is nothing to interpret.
    """
    x = logits.astype(jnp.float32)
    pull = grad * choice.scale
    scores = _scored(x, choice.score)
    weight = jnp.take_along_axis(scores, index, 1)
    if choice.score == "softmax_after":
        weight = _scored(weight, "softmax")
    if choice.renormalize:
        total = weight.sum(1, keepdims=True) + 1e-20
        # The weights sum to one whatever the logits are, unless they all but vanish: what their gradients have in
        # common is nothing, and taken away it leaves no rounding error in its place.
        pull = pull - jnp.where(total > 1e-12, pull[:, :1], 0)
        pull = (pull - (pull * weight).sum(1, keepdims=True) / total) / total
    common = (pull * weight).sum(1, keepdims=True)
    if choice.score == "sigmoid":
        own, rest = pull * (1 - weight) * weight, jnp.zeros_like(x)
    elif choice.score == "softmax":
        own, rest = pull * weight, -scores * common
    else:
        own, rest = (pull - common) * weight, jnp.zeros_like(x)
    rows = jnp.arange(x.shape[0])[:, None]
    return rest.at[rows, index].add(own).astype(logits.dtype)
