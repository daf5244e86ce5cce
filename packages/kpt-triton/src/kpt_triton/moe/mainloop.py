"""What the grouped products share: which rows a tile has, and the sum over the inner size.

Rows are sorted by expert and `offsets` says where each expert ends. The host knows how many rows there are, not where
the experts end: a launch is bounded by shapes, each program finds its tiles, and nothing waits for the device.
"""

import triton
import triton.language as tl

from kpt_triton.numeric import INTERPRETED, dot, widen

#: Rows and columns of quantised weights that share one scale.
SCALE_BLOCK = tl.constexpr(128)


@triton.jit
def last_tiles(offsets, rows, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, TAIL: tl.constexpr):
    """`[EXPERTS]`: the tiles of each expert and all before it. With TAIL, rows of no expert count as one more."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(offsets + expert, mask=expert < experts, other=rows)
    start = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert <= experts), other=rows)
    start = tl.where(expert == 0, 0, start)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    if not TAIL:
        tiles = tl.where(expert < experts, tiles, 0)
    return tl.cumsum(tiles, 0)


@triton.jit
def place_of(tile, last, tiles_n, GROUP: tl.constexpr):
    """(expert, row of tiles, column of tiles, tiles before the expert): GROUP rows of tiles walk along N together."""
    tiles_m = tl.max(last, 0)
    band = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tile % (GROUP * tiles_n)
    tile_m = band * GROUP + within % height
    before = last <= tile_m
    return tl.sum(before.to(tl.int32), 0), tile_m, within // height, tl.max(tl.where(before, last, 0), 0)


@triton.jit
def rows_of(tile_m, before, offsets, expert, rows, experts, BLOCK_M: tl.constexpr):
    """(first row of the tile, end of its expert)."""
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert, mask=expert < experts, other=rows)
    return start + (tile_m - before) * BLOCK_M, end


@triton.jit
def _load_weight(
    w, pointers, expert, column, k, N, K, inside, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_K, BLOCK_N]` of an expert's matrix."""
    if LAYOUT == "NK":
        return w.load([expert * N + column, k]).T
    elif LAYOUT == "KN":
        return w.load([expert * K + k, column])
    elif EVEN_K and EVEN_N:
        return tl.load(pointers)
    else:
        within = (k + tl.arange(0, BLOCK_K) < K)[:, None]
        return tl.load(pointers, mask=within & inside[None, :], other=0.0)


@triton.jit
def _multiply(acc, x, w, scale, PRECISION: tl.constexpr, SCALE: tl.constexpr):
    """`acc + x @ w`, w widened to what x is; with SCALE "k", x is first multiplied by `scale` `[BLOCK_K]`.

    That product has more digits than a narrow type, so that its rounded part and the rest are multiplied one by one.
    """
    if SCALE == "k":
        wide = widen(x, tl.float32) * scale[None, :]
        if x.dtype == tl.float32:  # noqa: SIM114
            return dot(wide, widen(w, tl.float32), acc, PRECISION)
        elif INTERPRETED:
            return dot(wide, widen(w, tl.float32), acc, PRECISION)
        else:
            high = wide.to(tl.bfloat16)
            low = (wide - high.to(tl.float32)).to(tl.bfloat16)
            w = widen(w, tl.bfloat16)
            return dot(low, w, dot(high, w, acc, PRECISION), PRECISION)
    # Each condition by itself: the oldest of the compilers that are served has no `or` of what it knows of types.
    elif x.dtype.is_int():  # noqa: SIM114
        return dot(widen(x, tl.bfloat16), widen(w, tl.bfloat16), acc, PRECISION)
    elif x.dtype.is_fp8():
        return dot(widen(x, tl.bfloat16), widen(w, tl.bfloat16), acc, PRECISION)
    elif w.dtype.is_int():  # noqa: SIM114
        return dot(x, widen(w, x.dtype), acc, PRECISION)
    elif w.dtype.is_fp8():
        return dot(x, widen(w, x.dtype), acc, PRECISION)
    else:
        return dot(x, w, acc, PRECISION)


@triton.jit
def _add_codes(
    acc, x, w, scales, stride_sn, x_scales, column, inside, SCALE: tl.constexpr, X_SCALE: tl.constexpr,
    CODES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`acc + (x @ w) * scale * x_scale` of two 8-bit operands, multiplied as they are by matrix units for them.

    What the names do not say:
        scales: pointer to the expert's scales of 128 by 128 in this step.
        x_scales: `[BLOCK_M]`, pointers to those of x in this step.
        CODES: "promoted" where the units add with fewer bits than float32 has: they then add up the products of a step
            alone, whose sum is added to `acc` in float32. Otherwise "native".
        ALIGNED: `column` is a multiple of the tile's columns.
    """
    if INTERPRETED:
        x = widen(x, tl.float32)
        w = widen(w, tl.float32)
    if SCALE != "block" and not X_SCALE and CODES == "native":
        return tl.dot(x, w, acc, input_precision="ieee")
    # Without a limit the compiler would have the units of sm90 add up the whole row.
    part = tl.dot(x, w, input_precision="ieee", max_num_imprecise_acc=x.shape[1])
    if SCALE == "block":
        if ALIGNED and w.shape[1] <= SCALE_BLOCK:
            # All columns are of one block. Its scale, as often as there are rows, goes into that of x.
            same = tl.zeros((x.shape[0],), tl.int32)
            factor = tl.load(scales + column // SCALE_BLOCK * stride_sn + same)
            if X_SCALE:
                factor *= tl.load(x_scales)
            return acc + part * factor[:, None]
        columns = column + tl.arange(0, w.shape[1])
        part *= tl.load(scales + columns // SCALE_BLOCK * stride_sn, mask=inside, other=0.0)[None, :]
    if X_SCALE:
        part *= tl.load(x_scales)[:, None]
    return acc + part


@triton.jit
def accumulate(
    x, x_rows, stride_xr, first_row, w, expert, stride_we, stride_wk, stride_wn, scale, stride_se, stride_sk, stride_sn,
    x_scale, stride_xsr, column, second, inside, N, K, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    PAIR: tl.constexpr, X_DESCRIPTOR: tl.constexpr, LAYOUT: tl.constexpr, SCALE: tl.constexpr, X_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, SPECIALIZE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """The product of BLOCK_M rows of x and BLOCK_N columns of an expert's matrix, and with PAIR of as many others.

    What the names do not say:
        x: pointer, its inner size contiguous, or a descriptor of `[rows, K]` with blocks `[BLOCK_M, BLOCK_K]`.
        x_rows: `[BLOCK_M]` int64, the row of x for each row of the tile; unused with X_DESCRIPTOR.
        first_row: row of x where the tile begins, for X_DESCRIPTOR.
        w: pointer, or with LAYOUT a descriptor of `[experts * N, K]` ("NK") or `[experts * K, N]` ("KN").
        scale: float32 scales of 8-bit weights. SCALE "block" has one for each 128 by 128, "k" one for each of K; ""
            leaves them out.
        CODES: how two 8-bit operands are multiplied: widened for "", else see `_add_codes`; not with SCALE "k".
        x_scale: float32 `[rows, blocks of 128 along K]` of an 8-bit x with X_SCALE.
        column: the first column.
        second: the first column of the others.
        inside: `[BLOCK_N]`, which columns there are.
        steps: K, or 0 where there is nothing to multiply.

    Returns:
        Two sums `[BLOCK_M, BLOCK_N]` in float32; the second one is zero without PAIR.
    """
    columns = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    if not X_DESCRIPTOR:
        x_pointers = x + x_rows[:, None] * stride_xr + inner[None, :]
    w_pointers = w
    w_others = w
    if LAYOUT == "":
        start = w + expert.to(tl.int64) * stride_we + inner.to(tl.int64)[:, None] * stride_wk
        w_pointers = start + (column + columns).to(tl.int64)[None, :] * stride_wn
        w_others = start + (second + columns).to(tl.int64)[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other = acc
    for k in tl.range(0, steps, BLOCK_K, warp_specialize=SPECIALIZE):
        if X_DESCRIPTOR:
            x_tile = x.load([first_row, k])
        elif EVEN_K:
            x_tile = tl.load(x_pointers)
        else:
            x_tile = tl.load(x_pointers, mask=(k + inner < K)[None, :], other=0.0)
        factor = 1.0
        if SCALE == "k":
            factor = tl.load(
                scale + expert.to(tl.int64) * stride_se + (k + inner) * stride_sk, mask=k + inner < K, other=0.0
            )
        w_tile = _load_weight(w, w_pointers, expert, column, k, N, K, inside, BLOCK_K, EVEN_K, EVEN_N, LAYOUT)
        if PAIR:
            w_other = _load_weight(w, w_others, expert, second, k, N, K, inside, BLOCK_K, EVEN_K, EVEN_N, LAYOUT)
        if CODES != "":
            scales = scale + expert.to(tl.int64) * stride_se + (k // SCALE_BLOCK) * stride_sk
            x_scales = x_scale + x_rows * stride_xsr + k // SCALE_BLOCK
            acc = _add_codes(
                acc, x_tile, w_tile, scales, stride_sn, x_scales, column, inside, SCALE, X_SCALE, CODES, True
            )
            if PAIR:
                # The others begin anywhere where the number of columns is no multiple of a tile's.
                other = _add_codes(
                    other, x_tile, w_other, scales, stride_sn, x_scales, second, inside, SCALE, X_SCALE, CODES, EVEN_N
                )
        elif SCALE == "block" or X_SCALE:
            part = _multiply(tl.zeros_like(acc), x_tile, w_tile, factor, PRECISION, SCALE)
            if X_SCALE:
                part *= tl.load(x_scale + x_rows * stride_xsr + k // SCALE_BLOCK)[:, None]
            if SCALE == "block":
                scales = scale + expert.to(tl.int64) * stride_se + (k // SCALE_BLOCK) * stride_sk
                part *= tl.load(scales + (column + columns) // SCALE_BLOCK * stride_sn, mask=inside, other=0.0)[None, :]
            acc += part
            if PAIR:
                part = _multiply(tl.zeros_like(acc), x_tile, w_other, factor, PRECISION, SCALE)
                if X_SCALE:
                    part *= tl.load(x_scale + x_rows * stride_xsr + k // SCALE_BLOCK)[:, None]
                if SCALE == "block":
                    scales = scale + expert.to(tl.int64) * stride_se + (k // SCALE_BLOCK) * stride_sk
                    places = (second + columns) // SCALE_BLOCK * stride_sn
                    part *= tl.load(scales + places, mask=inside, other=0.0)[None, :]
                other += part
        else:
            acc = _multiply(acc, x_tile, w_tile, factor, PRECISION, SCALE)
            if PAIR:
                other = _multiply(other, x_tile, w_other, factor, PRECISION, SCALE)
        if not X_DESCRIPTOR:
            x_pointers += BLOCK_K
        if LAYOUT == "":
            w_pointers += tl.cast(stride_wk, tl.int64) * BLOCK_K
            w_others += tl.cast(stride_wk, tl.int64) * BLOCK_K
    return acc, other
