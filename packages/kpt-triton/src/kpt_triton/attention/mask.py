"""Masks of `attention.dense` in tiles: which ones a tile of queries needs, and which keys a query sees in one.

What a query sees of 64 keys is a word of 64 bits, whatever the plan is made of: causality and intervals make words of
ones, blocks have them. So a mask costs a row of a tile, not a score.
"""

import triton
import triton.language as tl


@triton.jit
def _ones(count):
    """Words whose lowest bits are ones: as many as `count` says, none below 0, all from 64 on."""
    count = tl.minimum(tl.maximum(count, 0), 64)
    word = tl.full(count.shape, 1, tl.int64) << tl.minimum(count, 63).to(tl.int64)
    return tl.where(count == 64, tl.full(count.shape, -1, tl.int64), word - 1)


@triton.jit
def _words(
    row, inside, first, keys, position, intervals, table, bits,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """`[rows]` int64: which of the 64 keys from `first`, a multiple of 64, each row sees."""
    found = _ones(keys - first + tl.zeros_like(row))
    if CAUSAL:
        found &= _ones(row + position + 1 - first)
    if INTERVALS > 0:
        some = tl.zeros_like(found)
        for i in range(INTERVALS):
            at = intervals + (row.to(tl.int64) * INTERVALS + i) * 2
            begin = tl.load(at, mask=inside, other=0)
            end = tl.load(at + 1, mask=inside, other=0)
            some |= _ones(end - first) & ~_ones(begin - first)
        found &= some
    if BITS:
        entry = tl.load(table + first // 128) + tl.zeros_like(row)
        at = bits + ((tl.maximum(entry - 2, 0).to(tl.int64) * 128 + row % 128) * 2 + first % 128 // 64)
        word = tl.load(at, mask=inside & (entry >= 2), other=0)
        found &= tl.where(entry == 1, tl.full(word.shape, -1, tl.int64), word)
    return tl.where(inside, found, 0)


@triton.jit
def allowed(
    row, inside, start, keys, position, intervals, table, bits,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """`[rows, KEYS]`: which keys from `start` on each row sees; rows that are not `inside` see none."""
    column = tl.arange(0, KEYS)
    if INTERVALS == 0 and not BITS:
        key = start + column
        seen = (key < keys)[None, :] & inside[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= (row + position)[:, None])
        return seen
    else:
        first = start // 64 * 64
        place = column + (start - first)
        word = _words(row, inside, first, keys, position, intervals, table, bits, CAUSAL, INTERVALS, BITS)
        word = word[:, None]
        if KEYS > 64:
            high = _words(row, inside, first + 64, keys, position, intervals, table, bits, CAUSAL, INTERVALS, BITS)
            word = tl.where((place < 64)[None, :], word, high[:, None])
        return ((word >> (place % 64).to(tl.int64)[None, :]) & 1) != 0


@triton.jit(do_not_specialize=["queries", "keys", "position", "tiles"])
def schedule_kernel(
    lists, counts, intervals, table, stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    queries, keys, position, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOME: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Of each tile of rows: its full tiles of keys from the left, those with a mask from the right, and two counts.

    A tile is full where every row sees all keys of it; one that no row sees is in no list. SOME are looked at at once.
    """
    line, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + line
    lists += place * tiles
    intervals += batch * stride_ib + head * stride_ih
    table += batch * stride_tb + head * stride_th + (line * ROWS // 128).to(tl.int64) * stride_tm
    row = line * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    fulls = 0
    masked = 0
    for first in range(0, tiles, SOME):
        tile = first + tl.arange(0, SOME)
        begin = tile * KEYS
        end = tl.minimum(begin + KEYS, keys)
        state = tl.where(begin + KEYS > keys, 1, 2)  # keys past the last one are masked
        if CAUSAL:
            last = tl.minimum(line * ROWS + ROWS, queries) - 1 + position
            state = tl.minimum(state, (begin <= last).to(tl.int32) + (end - 1 <= line * ROWS + position).to(tl.int32))
        if INTERVALS > 0:
            live = tl.zeros((ROWS, SOME), tl.int32)
            whole = tl.zeros((ROWS, SOME), tl.int32)
            for i in range(INTERVALS):
                at = intervals + (row.to(tl.int64) * INTERVALS + i) * 2
                low = tl.load(at, mask=inside, other=0)[:, None]
                high = tl.load(at + 1, mask=inside, other=0)[:, None]
                live |= ((low < end[None, :]) & (high > begin[None, :]) & (low < high)).to(tl.int32)
                whole |= ((low <= begin[None, :]) & (high >= end[None, :])).to(tl.int32)
            whole = tl.where(inside[:, None], whole, 1)
            state = tl.minimum(state, tl.max(live, 0) + tl.min(whole, 0))
        if BITS:
            entry = tl.load(table + begin // 128, mask=tile < tiles, other=0)
            state = tl.minimum(state, tl.where(entry == 1, 2, tl.where(entry == 0, 0, 1)))
        state = tl.where(tile < tiles, state, 0)
        full = (state == 2).to(tl.int32)
        part = (state == 1).to(tl.int32)
        tl.store(lists + fulls + tl.cumsum(full, 0) - 1, tile, mask=full == 1)
        tl.store(lists + tiles - masked - tl.cumsum(part, 0), tile, mask=part == 1)
        fulls += tl.sum(full, 0)
        masked += tl.sum(part, 0)
    tl.store(counts + place * 2, fulls)
    tl.store(counts + place * 2 + 1, masked)
