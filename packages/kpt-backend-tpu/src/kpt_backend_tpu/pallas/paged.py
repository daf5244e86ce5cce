"""Steps of decoding over keys and values in pages: one query a sequence, pages read where the block table says.

JAX's own paged attention wants its caches by heads, or keys and values interleaved; this reads them as the op has them.
A page's keys of all heads are multiplied with all queries at once, and what belongs to another head is masked: a page
of few keys would fill a matrix unit badly head by head, and decoding waits for memory, not for it.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kpt_backend_tpu.layouts import Scores

#: Keys of all heads that a step multiplies at once where pages are smaller; and pages that it reads at most.
KEYS, MOST_TOGETHER = 1024, 8
_LEAST = float(np.finfo(np.float32).min)
_form: Any = jax.ShapeDtypeStruct


def _dot(one: jax.Array, other: jax.Array, over: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if one.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = (((over[0],), (over[1],)), ((), ()))
    found: jax.Array = lax.dot_general(one, other, contract, precision=precision, preferred_element_type=jnp.float32)
    return found


def _kernel(table: Any, first: Any, past: Any, *refs: Any, together: int, groups: int, scores: Scores) -> None:
    """Add some pages to a sequence's sums.

    Args:
        table: read ahead by the pipeline.
        first: `[B]`, the first key that a sequence's query sees.
        past: `[B]`, the first after these.
        *refs: the query, pages of keys, as many of values, `[Hq, 3]` with the keys' scale, the values' scale and the
            sink, the results, and what is kept from step to step.
        together: pages of a step.
        groups: heads of queries that read a head of keys.
        scores: what happens to them.
    """
    q, *caches, rows, out, lse, total, highest, sums = refs
    ks, vs = caches[:together], caches[together:]
    sequence, page = pl.program_id(0), pl.program_id(1)
    size, heads = together * ks[0].shape[1], ks[0].shape[2]
    begin, end = first[sequence], past[sequence]

    @pl.when(page == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)
        highest[...] = jnp.full_like(highest, _LEAST)
        sums[...] = jnp.zeros_like(sums)

    @pl.when((page * size < end) & ((page + 1) * size > begin))
    def _() -> None:
        def flat(refs: list[Any]) -> jax.Array:
            wide = [ref[0].astype(jnp.float32).reshape(-1, ref.shape[3]) for ref in refs]
            return wide[0] if together == 1 else jnp.concatenate(wide, 0)

        def number(shape: tuple[int, ...], dim: int) -> jax.Array:
            return lax.broadcasted_iota(jnp.int32, shape, dim)

        shape = (q.shape[1], size * heads)
        column = number(shape, 1)
        place = page * size + lax.div(column, jnp.int32(heads))
        own = lax.rem(column, jnp.int32(heads)) == lax.div(number(shape, 0), jnp.int32(groups))
        seen = (place >= begin) & (place < end) & own
        score = _dot(q[0], flat(ks).astype(q.dtype), (1, 1)) * (rows[:, 0:1] * scores.scale)
        if scores.softcap:
            score = scores.softcap * jnp.tanh(score / scores.softcap)
        score = jnp.where(seen, score, _LEAST)
        most = jnp.maximum(highest[:, :1], score.max(1, keepdims=True))
        weight = jnp.where(seen, jnp.exp(score - most), 0)
        shrunk = jnp.exp(highest[:, :1] - most)
        sums[...] = sums[...] * shrunk + weight.sum(1, keepdims=True)
        highest[...] = jnp.broadcast_to(most, highest.shape)

        value = flat(vs)
        added = _dot(weight.astype(q.dtype), value.astype(q.dtype), (1, 0))
        whole = jnp.min(jnp.where(added - added == 0, 1.0, 0.0))
        total[...] = total[...] * shrunk

        @pl.when(whole == 1)
        def _() -> None:
            total[...] += added

        @pl.when(whole == 0)
        def _() -> None:  # of what nobody sees, perhaps; by weights of zero it would reach queries of other heads, too
            there = page * size + lax.div(number(value.shape, 0), jnp.int32(heads))
            known = jnp.where((there >= begin) & (there < end), value, 0)
            finite = known - known == 0
            total[...] += _dot(weight.astype(q.dtype), jnp.where(finite, known, 0).astype(q.dtype), (1, 0))
            sees, spoils = (jnp.where(each, 1.0, 0.0).astype(jnp.bfloat16) for each in (seen, ~finite))
            total[...] = jnp.where(_dot(sees, spoils, (1, 0)) > 0, jnp.nan, total[...])

    @pl.when(page == pl.num_programs(1) - 1)
    def _() -> None:
        most = jnp.maximum(highest[:, :1], rows[:, 2:3])
        shrunk = jnp.exp(highest[:, :1] - most)
        whole = sums[:, :1] * shrunk + jnp.exp(rows[:, 2:3] - most)
        dead = whole == 0
        safe = jnp.where(dead, 1, whole)
        out[0] = (jnp.where(dead, 0, total[...] * (shrunk / safe)) * rows[:, 1:2]).astype(out.dtype)
        lse[0] = jnp.broadcast_to(jnp.where(dead, -jnp.inf, most + jnp.log(safe)), lse.shape[1:])


def decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    window: int,
    scores: Scores,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query of each sequence; return the output `[B, Hq, Dv]` and the log-sum-exp `[B, Hq]` float32.

    Args:
        q: `[B, Hq, D]` float32 or bfloat16.
        k_cache: `[pages, page_size, Hkv, D]` of that dtype, or 8-bit.
        v_cache: `[pages, page_size, Hkv, Dv]`, likewise.
        block_table: `[B, most pages]` int32.
        lengths: `[B]` int32.
        sinks: `[Hq]` float32, or None.
        k_scale: `[Hkv]` float32, or None.
        v_scale: likewise.
        window: how many keys a query sees; 0 for all.
        scores: scale and softcap.
        interpret: run the kernel without a TPU.
    """
    (batch, heads, dim), (pages, size, kv_heads, value_dim) = q.shape, v_cache.shape
    most, groups = block_table.shape[1], heads // kv_heads
    together = min(max(KEYS // (size * kv_heads), 1), MOST_TOGETHER, most)

    def row(given: jax.Array | None, neutral: float) -> jax.Array:
        whole = jnp.full((heads,), neutral, jnp.float32) if given is None else given
        return jnp.repeat(whole, heads // whole.shape[0])

    rows = jnp.stack((row(k_scale, 1.0), row(v_scale, 1.0), row(sinks, -jnp.inf)), 1)
    past = jnp.clip(lengths, 0, most * size)
    first = jnp.maximum(past - window, 0) if window else jnp.zeros_like(past)
    steps = pl.cdiv(most, together)
    # Before and after what is seen, the page that is there already: it isn't fetched twice. Made here, since each step
    # of the grid asks for its pages and for those of the next one.
    begin, end = first // size, jnp.maximum(past - 1, 0) // size
    place = jnp.clip(jnp.arange(steps * together, dtype=jnp.int32), begin[:, None], end[:, None])
    table = jnp.clip(jnp.take_along_axis(block_table, place, 1), 0, pages - 1).reshape(-1)

    def page_of(b: Any, j: Any, table: Any, first: Any, past: Any, of_step: int) -> tuple[Any, int, int, int]:
        return table[(b * steps + j) * together + of_step], 0, 0, 0

    def pages_of(dims: int) -> list[pl.BlockSpec]:
        shape = (1, size, kv_heads, dims)
        return [pl.BlockSpec(shape, partial(page_of, of_step=number)) for number in range(together)]

    def of_sequence(b: Any, *_: Any) -> tuple[Any, int, int]:
        return b, 0, 0

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(batch, steps),
        in_specs=[
            pl.BlockSpec((1, heads, dim), of_sequence),
            *pages_of(dim),
            *pages_of(value_dim),
            pl.BlockSpec((heads, 3), lambda *_: (0, 0)),
        ],
        out_specs=[pl.BlockSpec((1, heads, value_dim), of_sequence), pl.BlockSpec((1, heads, 128), of_sequence)],
        scratch_shapes=[
            pltpu.VMEM((heads, value_dim), jnp.float32),
            pltpu.VMEM((heads, 128), jnp.float32),
            pltpu.VMEM((heads, 128), jnp.float32),
        ],
    )
    out, lse = pl.pallas_call(
        partial(_kernel, together=together, groups=groups, scores=scores),
        grid_spec=grid,
        out_shape=[_form((batch, heads, value_dim), q.dtype), _form((batch, heads, 128), jnp.float32)],
        name="paged_decode",
        interpret=interpret,
    )(table, first, past, q, *[k_cache] * together, *[v_cache] * together, rows)
    return out, lse[:, :, 0]
