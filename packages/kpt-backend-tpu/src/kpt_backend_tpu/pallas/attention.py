"""Softmax attention over the live blocks of a mask that is known at run time: forward and backward, by own kernels.

JAX's splash attention compiles a mask in, or reads one of all queries by all keys. Here a table of live blocks is read
before each step: dead blocks are neither fetched nor computed. Scores stand as `[keys, queries]`, so that what belongs
to a query (its intervals, its largest score, its sum) is a row of lanes, dense in memory.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kpt_backend_tpu.layouts import Scores
from kpt_backend_tpu.tiles import BLOCK, attention_tile

_LEAST = float(np.finfo(np.float32).min)
_form: Any = jax.ShapeDtypeStruct
_ROWS, _COLUMNS = ((0,), (0,)), ((1,), (1,))


class _Mask(NamedTuple):
    """Which keys queries see, as the kernels read it.

    Attributes:
        live: `[B or 1, H or 1, query tiles, key tiles]` bool.
        intervals: `[B or 1, H or 1, 2 n, Q]` int32, or None: begin and end of each interval.
        blocks: as the op has it, or None.
        bits: `[n, 128, 128]` int8, or None: keys by queries.
        position: `[1]` int32.
    """

    live: jax.Array
    intervals: jax.Array | None
    blocks: jax.Array | None
    bits: jax.Array | None
    position: jax.Array


class _Shape(NamedTuple):
    """Hold what the kernels are specialised for.

    Attributes:
        queries: of a sequence.
        keys: likewise.
        groups: heads of queries that read a head of keys.
        height: queries of a tile.
        width: keys of a tile.
        batches: of the table of live blocks: 1 if all sequences are alike.
        heads: likewise.
        scores: what happens to them.
    """

    queries: int
    keys: int
    groups: int
    height: int
    width: int
    batches: int
    heads: int
    scores: Scores

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.queries, self.height), pl.cdiv(self.keys, self.width)

    def row(self, b: Any, h: Any, tile: Any, tiles: int) -> Any:
        """Return the row of a table that a sequence, a head and a tile read."""
        return (_at(b, self.batches) * self.heads + _at(h, self.heads)) * tiles + tile


def _at(index: Any, size: int) -> Any:
    return index if size > 1 else 0


def _prepare(
    q: jax.Array,
    k: jax.Array,
    intervals: jax.Array | None,
    blocks: jax.Array | None,
    block_bits: jax.Array | None,
    position: jax.Array,
    scores: Scores,
) -> tuple[_Mask, _Shape]:
    queries, keys = q.shape[2], k.shape[2]
    height, width = attention_tile(queries, keys, q.dtype.itemsize, blocks is not None)
    tiles = pl.cdiv(queries, height), pl.cdiv(keys, width)
    live = jnp.ones((1, 1, *tiles), bool)
    begins = jnp.arange(tiles[1]) * width
    if scores.causal:
        last = jnp.minimum(jnp.arange(1, tiles[0] + 1) * height, queries) - 1 + position
        live &= begins <= last[:, None]
    if intervals is not None:
        padding = ((0, 0), (0, 0), (0, -queries % height), (0, 0), (0, 0))
        rows = jnp.pad(intervals, padding)[..., None]
        begin, end = rows[..., 0, :], rows[..., 1, :]
        seen = ((begin < end) & (begin < begins + width) & (end > begins)).any(3)
        live &= seen.reshape(*seen.shape[:2], tiles[0], height, tiles[1]).any(3)
        intervals = intervals.reshape(*intervals.shape[:3], -1).mT
    bits = None
    if blocks is not None and block_bits is not None:
        live &= blocks > 0
        wide = (block_bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        bits = wide.astype(jnp.int8).reshape(-1, BLOCK, BLOCK).mT
        bits = bits if bits.shape[0] else jnp.zeros((1, BLOCK, BLOCK), jnp.int8)
    groups = q.shape[1] // k.shape[1]
    shape = _Shape(queries, keys, groups, height, width, live.shape[0], live.shape[1], scores)
    return _Mask(live, intervals, blocks, bits, position), shape


def _tables(mask: _Mask, by_keys: bool) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return what is read ahead of the steps, and how many steps there are at most.

    That is for each tile of queries (of keys, if `by_keys`) the number of live tiles across, and their places; then the
    states of blocks, and the position of the first query.
    """
    live = mask.live.mT if by_keys else mask.live
    counts = live.sum(-1, dtype=jnp.int32)
    places = jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32)
    states = jnp.zeros(1, jnp.int32) if mask.blocks is None else mask.blocks.reshape(-1)
    return (counts.reshape(-1), places.reshape(-1), states, mask.position), jnp.maximum(counts.max(), 1)


class _Places(NamedTuple):
    """Where a step of a grid stands, from its indices and the tables that were read ahead."""

    b: Any
    h: Any
    i: Any
    j: Any
    live: Any
    state: Any


def _places(shape: _Shape, mask_blocks: tuple[int, ...] | None, by_keys: bool, indices: Any, tables: Any) -> _Places:
    counts, places, states = tables[:3]
    rows, columns = shape.tiles
    if by_keys:
        b, kv, j, g, step = indices
        h = kv * shape.groups + g
        row, across = shape.row(b, h, j, columns), rows
    else:
        b, h, i, step = indices
        row, across = shape.row(b, h, i, rows), columns
    count = counts[row]
    # Past the last live tile its place is repeated: what is there already is not fetched again.
    other = places[row * across + jnp.minimum(step, jnp.maximum(count - 1, 0))]
    i, j = (other, j) if by_keys else (i, other)
    state = 0
    if mask_blocks is not None:
        own = _at(b, mask_blocks[0]) * mask_blocks[1] + _at(h, mask_blocks[1])
        state = states[(own * rows + i) * columns + j]
    return _Places(b, h, i, j, step < count, state)


def _specs(shape: _Shape, mask: _Mask, by_keys: bool, head_dim: int, value_dim: int) -> dict[str, Any]:
    """Return the blocks of each operand: of queries, keys, statistics of rows, and masks."""
    known = None if mask.blocks is None else mask.blocks.shape

    def spec(block: tuple[int | None, ...], place: Any) -> Any:
        def index(*given: Any) -> Any:
            of = len(given) - 4
            return place(_places(shape, known, by_keys, given[:of], given[of:]))

        return pl.BlockSpec(block, index)

    height, width, groups = shape.height, shape.width, shape.groups
    intervals = None
    if mask.intervals is not None:
        batches, heads, number, _ = mask.intervals.shape
        intervals = spec((None, None, number, height), lambda at: (_at(at.b, batches), _at(at.h, heads), 0, at.i))
    bits = spec((None, BLOCK, BLOCK), lambda at: (jnp.maximum(at.state - 2, 0), 0, 0))
    return {
        "q": spec((None, None, height, head_dim), lambda at: (at.b, at.h, at.i, 0)),
        "g": spec((None, None, height, value_dim), lambda at: (at.b, at.h, at.i, 0)),
        "k": spec((None, None, width, head_dim), lambda at: (at.b, lax.div(at.h, jnp.int32(groups)), at.j, 0)),
        "v": spec((None, None, width, value_dim), lambda at: (at.b, lax.div(at.h, jnp.int32(groups)), at.j, 0)),
        "row": spec((None, None, 1, height), lambda at: (at.b, at.h, 0, at.i)),
        "intervals": intervals,
        "bits": None if mask.bits is None else bits,
    }


def _dot(one: jax.Array, other: jax.Array, over: Any) -> jax.Array:
    precision = lax.Precision.HIGHEST if one.dtype == jnp.float32 else lax.Precision.DEFAULT
    found: jax.Array = lax.dot_general(
        one, other, (over, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    return found


def _allowed(shape: _Shape, at: _Places, position: Any, intervals: Any, bits: Any) -> jax.Array:
    """Return which scores of a tile count, `[keys, queries]` bool."""
    size = (shape.width, shape.height)
    columns = lax.broadcasted_iota(jnp.int32, size, 0) + at.j * shape.width
    rows = lax.broadcasted_iota(jnp.int32, size, 1) + at.i * shape.height
    found: jax.Array = (columns < shape.keys) & (rows < shape.queries)
    if shape.scores.causal:
        found &= columns <= rows + position[0]
    if intervals is not None:
        inside = jnp.zeros(size, bool)
        for place in range(0, intervals.shape[0], 2):
            begin, end = intervals[place : place + 1, :], intervals[place + 1 : place + 2, :]
            inside |= (columns >= begin) & (columns < end)
        found &= inside
    if bits is not None:
        found &= (bits[...].astype(jnp.int32) + (at.state == 1).astype(jnp.int32)) > 0
    return found


def _scores(shape: _Shape, q: jax.Array, k: jax.Array, allowed: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return a tile's scores, `[keys, queries]`, -inf where they do not count; and the slope of the cap."""
    scores, slope = _dot(k, q, _COLUMNS) * shape.scores.scale, None
    if shape.scores.softcap:
        capped = jnp.tanh(scores / shape.scores.softcap)
        scores, slope = capped * shape.scores.softcap, 1 - capped * capped
    return jnp.where(allowed, scores, -jnp.inf), slope


def _of_seen(rows: jax.Array, seen: jax.Array) -> jax.Array:
    """Return rows with zeros for those that nobody sees (or that see nobody), so that NaN there reaches nobody."""
    return jnp.where(seen > 0, rows.astype(jnp.float32), 0).astype(rows.dtype)


def _forward_kernel(
    shape: _Shape, blocks: Any, counts: Any, places: Any, states: Any, position: Any, q: Any, k: Any, v: Any,
    intervals: Any, bits: Any, sinks: Any, out: Any, highest: Any, sums: Any, largest: Any, total: Any, mean: Any,
) -> None:  # fmt: skip
    step = pl.program_id(3)
    at = _places(shape, blocks, False, [pl.program_id(n) for n in range(4)], (counts, places, states))

    @pl.when(step == 0)
    def _start() -> None:
        sink = jnp.full(largest.shape, sinks[at.h])
        largest[...] = jnp.maximum(sink, _LEAST)
        total[...] = jnp.exp(sink - largest[...])  # 1, or 0 without one; a NaN stays one
        mean[...] = jnp.zeros(mean.shape, jnp.float32)

    @pl.when(at.live)
    def _add() -> None:
        allowed = _allowed(shape, at, position, intervals, bits)
        scores, _ = _scores(shape, q[...], k[...], allowed)
        higher = jnp.maximum(largest[...], scores.max(0, keepdims=True))
        fading, weights = jnp.exp(largest[...] - higher), jnp.exp(scores - higher)
        values = _of_seen(v[...], allowed.astype(jnp.float32).max(1, keepdims=True))
        largest[...] = higher
        total[...] = total[...] * fading + weights.sum(0, keepdims=True)
        mean[...] = mean[...] * fading + _dot(values, weights.astype(values.dtype), _ROWS)

    @pl.when(step == pl.num_programs(3) - 1)
    def _end() -> None:
        sums[...] = jnp.where(total[...] == 0, 1.0, total[...])
        highest[...] = largest[...]
        out[...] = (mean[...] / sums[...]).T.astype(out.dtype)


def _change(
    shape: _Shape, allowed: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, rows: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return a tile's probabilities and the gradient of its unscaled scores, `[keys, queries]`."""
    highest, sums, common = (row[...] for row in rows)
    scores, slope = _scores(shape, q, k, allowed)
    weights = jnp.where(allowed, jnp.exp(scores - highest) / sums, 0)
    change = weights * (_dot(v, g, _COLUMNS) - common)
    change = jnp.where(allowed, change if slope is None else change * slope, 0)
    return weights, change * shape.scores.scale


def _queries_kernel(
    shape: _Shape, blocks: Any, counts: Any, places: Any, states: Any, position: Any, q: Any, k: Any, v: Any,
    intervals: Any, bits: Any, g: Any, highest: Any, sums: Any, common: Any, out: Any, grad: Any,
) -> None:  # fmt: skip
    step = pl.program_id(3)
    at = _places(shape, blocks, False, [pl.program_id(n) for n in range(4)], (counts, places, states))

    @pl.when(step == 0)
    def _start() -> None:
        grad[...] = jnp.zeros(grad.shape, jnp.float32)

    @pl.when(at.live)
    def _add() -> None:
        allowed = _allowed(shape, at, position, intervals, bits)
        _, change = _change(shape, allowed, q[...], k[...], v[...], g[...], (highest, sums, common))
        keys = _of_seen(k[...], allowed.astype(jnp.float32).max(1, keepdims=True))
        grad[...] += _dot(keys, change.astype(keys.dtype), _ROWS)

    @pl.when(step == pl.num_programs(3) - 1)
    def _end() -> None:
        out[...] = grad[...].T.astype(out.dtype)


def _keys_kernel(
    shape: _Shape, blocks: Any, counts: Any, places: Any, states: Any, position: Any, q: Any, k: Any, v: Any,
    intervals: Any, bits: Any, g: Any, highest: Any, sums: Any, common: Any, out_k: Any, out_v: Any, grad_k: Any,
    grad_v: Any,
) -> None:  # fmt: skip
    group, step = pl.program_id(3), pl.program_id(4)
    at = _places(shape, blocks, True, [pl.program_id(n) for n in range(5)], (counts, places, states))

    @pl.when((group == 0) & (step == 0))
    def _start() -> None:
        grad_k[...] = jnp.zeros(grad_k.shape, jnp.float32)
        grad_v[...] = jnp.zeros(grad_v.shape, jnp.float32)

    @pl.when(at.live)
    def _add() -> None:
        allowed = _allowed(shape, at, position, intervals, bits)
        weights, change = _change(shape, allowed, q[...], k[...], v[...], g[...], (highest, sums, common))
        seeing = allowed.astype(jnp.float32).max(0, keepdims=True)
        seeing = jnp.broadcast_to(seeing, (BLOCK, shape.height)).T[:, :1]
        given, queries = _of_seen(g[...], seeing), _of_seen(q[...], seeing)
        grad_v[...] += _dot(weights.astype(given.dtype), given, ((1,), (0,)))
        grad_k[...] += _dot(change.astype(queries.dtype), queries, ((1,), (0,)))

    @pl.when((group == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def _end() -> None:
        out_k[...] = grad_k[...].astype(out_k.dtype)
        out_v[...] = grad_v[...].astype(out_v.dtype)


def _call(
    kernel: Any, shape: _Shape, mask: _Mask, by_keys: bool, grid: tuple[Any, ...], inputs: Any, outputs: Any,
    scratch: Any, interpret: bool,
) -> Any:  # fmt: skip
    """Run a kernel; inputs and outputs are arrays (or their forms) with their blocks."""
    tables, steps = _tables(mask, by_keys)
    arrays, in_specs = zip(*inputs, strict=True)
    forms, out_specs = zip(*outputs, strict=True)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(tables),
        grid=(*grid, steps),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
    )
    order: Any = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 2)
    return pl.pallas_call(
        partial(kernel, shape, None if mask.blocks is None else mask.blocks.shape),
        out_shape=forms,
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        name=f"attention{kernel.__name__.removesuffix('_kernel')}",
        interpret=interpret,
    )(*tables, *arrays)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    intervals: jax.Array | None,
    blocks: jax.Array | None,
    block_bits: jax.Array | None,
    sinks: jax.Array | None,
    position: jax.Array,
    *,
    scores: Scores,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute `attention.dense`.

    Args:
        q: `[B, Hq, Q, D]`, float32 or bfloat16.
        k: `[B, Hkv, K, D]`.
        v: `[B, Hkv, K, Dv]`.
        intervals: as the op has it, or None; and so the next three.
        blocks: likewise.
        block_bits: likewise.
        sinks: `[Hq]` float32, or None.
        position: `[1]` int32.
        scores: what happens to them.
        interpret: run the kernels without a TPU.

    Returns:
        The output; the log-sum-exp; and the largest score and the sum of exponentials of each row, as the op saves.
    """
    (batch, heads, queries, head_dim), value_dim = q.shape, v.shape[3]
    mask, shape = _prepare(q, k, intervals, blocks, block_bits, position, scores)
    specs = _specs(shape, mask, False, head_dim, value_dim)
    sinks = jnp.full(heads, -jnp.inf, jnp.float32) if sinks is None else sinks
    rows = _form((batch, heads, 1, shape.tiles[0] * shape.height), jnp.float32)
    out, highest, sums = _call(
        _forward_kernel,
        shape,
        mask,
        False,
        (batch, heads, shape.tiles[0]),
        [
            *((array, specs[name]) for name, array in (("q", q), ("k", k), ("v", v))),
            (mask.intervals, specs["intervals"]),
            (mask.bits, specs["bits"]),
            (sinks, pl.BlockSpec(memory_space=pltpu.SMEM)),
        ],
        [(_form((*q.shape[:3], value_dim), q.dtype), specs["g"]), *[(rows, specs["row"])] * 2],
        [(1, shape.height), (1, shape.height), (value_dim, shape.height)],
        interpret,
    )
    highest, sums = highest[:, :, 0, :queries], sums[:, :, 0, :queries]
    # A row that sees nothing has the sum 1 and the least score that there is.
    dead = (highest == _LEAST) & (sums == 1)
    return out, jnp.where(dead, -jnp.inf, highest + jnp.log(sums)), highest, sums


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    intervals: jax.Array | None,
    blocks: jax.Array | None,
    block_bits: jax.Array | None,
    sinks: jax.Array | None,
    position: jax.Array,
    out: jax.Array,
    highest: jax.Array,
    sums: jax.Array,
    grad_out: jax.Array | None,
    grad_lse: jax.Array | None,
    *,
    needs: tuple[str, ...],
    scores: Scores,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Compute the gradients of `attention.dense` that `needs` names, in that order.

    Args:
        q: as `forward` has it, and so the next ones.
        k: likewise.
        v: likewise.
        intervals: likewise.
        blocks: likewise.
        block_bits: likewise.
        sinks: likewise.
        position: likewise.
        out: what `forward` gave, and so the next two.
        highest: likewise.
        sums: likewise.
        grad_out: of the output; None if nobody used it.
        grad_lse: of the log-sum-exp, likewise.
        needs: names of the arguments whose gradients are wanted.
        scores: as `forward` has it.
        interpret: likewise.
    """
    (batch, heads, _, head_dim), value_dim = q.shape, v.shape[3]
    mask, shape = _prepare(q, k, intervals, blocks, block_bits, position, scores)
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    # What all scores of a row lose, since its probabilities sum to one; the log-sum-exp gives it back.
    common = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    common = common if grad_lse is None else common - grad_lse
    arrays = (q, k, v, mask.intervals, mask.bits, grad_out, *(each[:, :, None] for each in (highest, sums, common)))
    names = ("q", "k", "v", "intervals", "bits", "g", "row", "row", "row")
    found: dict[str, jax.Array] = {}
    if sinks is not None and "sinks" in needs:
        found["sinks"] = -(jnp.exp(sinks[:, None] - highest) / sums * common).sum((0, 2))
    if "q" in needs:
        specs = _specs(shape, mask, False, head_dim, value_dim)
        (found["q"],) = _call(
            _queries_kernel,
            shape,
            mask,
            False,
            (batch, heads, shape.tiles[0]),
            [(array, specs[name]) for array, name in zip(arrays, names, strict=True)],
            [(_form(q.shape, q.dtype), specs["q"])],
            [(head_dim, shape.height)],
            interpret,
        )
    if {"k", "v"}.intersection(needs):
        specs = _specs(shape, mask, True, head_dim, value_dim)
        found["k"], found["v"] = _call(
            _keys_kernel,
            shape,
            mask,
            True,
            (batch, k.shape[1], shape.tiles[1], shape.groups),
            [(array, specs[name]) for array, name in zip(arrays, names, strict=True)],
            [(_form(each.shape, each.dtype), specs[name]) for each, name in ((k, "k"), (v, "v"))],
            [(shape.width, head_dim), (shape.width, value_dim)],
            interpret,
        )
    return tuple(found[name] for name in needs)
