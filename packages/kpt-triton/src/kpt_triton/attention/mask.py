"""Masks of `attention.dense` in tiles: which ones a tile of queries needs, and which keys a query sees in one.

What a query sees of 64 keys is a word of 64 bits, whatever the plan is made of: causality and intervals make words of
ones, blocks have them. So a mask costs a row of a tile, not a score.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.launching import inner_contiguous

#: Rows and columns of a block of a plan.
_BLOCK = 128
#: Tiles that the schedule looks at at once.
SOME = 32


@triton.jit
def _either(a, b):
    return a | b


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
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """`[rows, KEYS]`, TURNED `[KEYS, rows]`: which keys from `start` on each row sees.

    Rows that are not `inside` see none; TURNED, where neither they nor keys past the last count, they may see some.
    """
    column = tl.arange(0, KEYS)
    if INTERVALS == 0 and not BITS:
        key = start + column
        if TURNED:
            seen = (key < keys)[:, None] & inside[None, :]
            if CAUSAL:
                seen = key[:, None] <= (row + position)[None, :]
        else:
            seen = (key < keys)[None, :] & inside[:, None]
            if CAUSAL:
                seen = seen & (key[None, :] <= (row + position)[:, None])
        return seen
    else:
        first = start // 64 * 64
        place = column + (start - first)
        shift = (place % 64).to(tl.int64)
        word = _words(row, inside, first, keys, position, intervals, table, bits, CAUSAL, INTERVALS, BITS)
        if TURNED:
            # Of a reduction's result compilers take one copy; the words themselves each thread would compute anew.
            word = tl.reduce(tl.broadcast_to(word[:, None], (word.shape[0], 2)), 1, _either)[None, :]
            shift = shift[:, None]
        else:
            word = word[:, None]
            shift = shift[None, :]
        if KEYS > 64:
            high = _words(row, inside, first + 64, keys, position, intervals, table, bits, CAUSAL, INTERVALS, BITS)
            if TURNED:
                high = tl.reduce(tl.broadcast_to(high[:, None], (high.shape[0], 2)), 1, _either)[None, :]
                word = tl.where((place < 64)[:, None], word, high)
            else:
                word = tl.where((place < 64)[None, :], word, high[:, None])
        return ((word >> shift) & 1) != 0


#: Arguments that follow from how many tokens there are, of kernels that take a plan: another number must not compile
#: them again. Nothing of a plan is read in vectors, so that what its strides are divisible by does not matter.
OF_TOKENS = [
    "queries", "keys", "position", "tiles", "lines",
    "stride_lb", "stride_lh", "stride_ib", "stride_ih", "stride_tb", "stride_th", "stride_tm",
]  # fmt: skip


@triton.jit(do_not_specialize=OF_TOKENS)
def schedule_kernel(
    lists, counts, intervals, table, stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    queries, keys, position, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOME: tl.constexpr, TURNED: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Of each tile of rows: its full tiles of keys from the left, those with a mask from the right, and two counts.

    TURNED: of each tile of keys its tiles of rows. A tile is full where every row sees all keys of it; one that no row
    sees is in no list. SOME are looked at at once.
    """
    own, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + own
    lists += place * tiles
    intervals += batch * stride_ib + head * stride_ih
    table += batch * stride_tb + head * stride_th
    fulls = 0
    masked = 0
    for first in range(0, tiles, SOME):
        other = first + tl.arange(0, SOME)
        # A tile of rows and one of keys, one of them the same for all.
        line = other if TURNED else own + 0 * other
        tile = own + 0 * other if TURNED else other
        top = line * ROWS
        begin = tile * KEYS
        end = tl.minimum(begin + KEYS, keys)
        if TURNED:  # keys past the last one are computed for nobody; rows are loaded
            state = tl.where(top + ROWS > queries, 1, 2)
        else:
            state = tl.where(begin + KEYS > keys, 1, 2)
        if CAUSAL:
            last = tl.minimum(top + ROWS, queries) - 1 + position
            state = tl.minimum(state, (begin <= last).to(tl.int32) + (end - 1 <= top + position).to(tl.int32))
        if INTERVALS > 0:
            row = top[None, :] + tl.arange(0, ROWS)[:, None] if TURNED else own * ROWS + tl.arange(0, ROWS)[:, None]
            inside = row < queries
            live = tl.zeros((ROWS, SOME), tl.int32)
            whole = tl.zeros((ROWS, SOME), tl.int32)
            for i in range(INTERVALS):
                at = intervals + (row.to(tl.int64) * INTERVALS + i) * 2
                low = tl.load(at, mask=inside, other=0)
                high = tl.load(at + 1, mask=inside, other=0)
                live |= ((low < end[None, :]) & (high > begin[None, :]) & (low < high)).to(tl.int32)
                whole |= ((low <= begin[None, :]) & (high >= end[None, :])).to(tl.int32)
            whole = tl.where(inside, whole, 1)
            state = tl.minimum(state, tl.max(live, 0) + tl.min(whole, 0))
        if BITS:
            at = table + (top // 128).to(tl.int64) * stride_tm + begin // 128
            entry = tl.load(at, mask=other < tiles, other=0)
            state = tl.minimum(state, tl.where(entry == 1, 2, tl.where(entry == 0, 0, 1)))
        state = tl.where(other < tiles, state, 0)
        full = (state == 2).to(tl.int32)
        part = (state == 1).to(tl.int32)
        tl.store(lists + fulls + tl.cumsum(full, 0) - 1, other, mask=full == 1)
        tl.store(lists + tiles - masked - tl.cumsum(part, 0), other, mask=part == 1)
        fulls += tl.sum(full, 0)
        masked += tl.sum(part, 0)
    tl.store(counts + place * 2, fulls)
    tl.store(counts + place * 2 + 1, masked)


@triton.jit
def tiles_of(
    lists, counts, place, line, queries, keys, position, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """How many full tiles of keys the line has, from the first on; and where those with a mask begin and end.

    `place` is the line's in the lists; LISTED, these are places in its list.
    """
    if LISTED:
        fulls = tl.load(counts + place * 2)
        begin = tiles - tl.load(counts + place * 2 + 1)
        end = tiles
    else:
        fulls = keys // KEYS
        end = tiles
        if CAUSAL:
            fulls = tl.minimum(fulls, tl.maximum(line * ROWS + position + 1, 0) // KEYS)
            last = tl.maximum(tl.minimum(line * ROWS + ROWS, queries) + position, 0)
            end = tl.minimum(end, tl.cdiv(last, KEYS))
        begin = fulls
    return fulls, begin, end


class Tensors(NamedTuple):
    """Hold a plan as kernels take it.

    Attributes:
        intervals, blocks: as in the call.
        bits: of blocks as words, `[blocks, 128, 2]`.
        strides: of intervals by sequence and head; of blocks by sequence, head and row.
    """

    intervals: Tensor | None
    blocks: Tensor | None
    bits: Tensor | None
    strides: tuple[int, ...]


class Schedule(NamedTuple):
    """Hold lists of tiles, how many they have, and lines from one sequence and head to the next."""

    lists: Tensor
    counts: Tensor
    strides: tuple[int, int]


def tensors_of(call: Any) -> Tensors:
    """Return the plan of a call."""
    intervals, blocks, bits = call.intervals, call.blocks, None
    strides = [0, 0, 0, 0, 0]
    if intervals is not None:
        intervals = intervals.contiguous()
        strides[:2] = _strides(intervals)
    if blocks is not None:
        blocks = inner_contiguous(blocks)
        strides[2:] = *_strides(blocks), blocks.stride(2)
        held = call.block_bits if len(call.block_bits) else call.block_bits.new_zeros(1, _BLOCK, _BLOCK // 8)
        held = held.contiguous()
        bits = (held.clone() if held.storage_offset() % 8 else held).view(torch.int64)
    return Tensors(intervals, blocks, bits, tuple(strides))


def schedule(call: Any, launch: Mapping[str, Any], plan: Tensors, unused: Tensor, *, turned: bool = False) -> Schedule:
    """List the tiles of keys of each tile of queries or, `turned`, those of queries of each one of keys.

    Args:
        call: of the op.
        launch: of the kernel that goes through the lists.
        plan: of the call; without tensors nothing is listed.
        unused: stands for lists where there are none.
        turned: whether tiles of keys are what has lists.
    """
    given = [each for each in plan[:2] if each is not None]
    if not given:
        return Schedule(unused, unused, (0, 0))
    queries, keys = call.q.shape[2], call.k.shape[2]
    lines, tiles = triton.cdiv(queries, launch["ROWS"]), triton.cdiv(keys, launch["KEYS"])
    lines, tiles = (tiles, lines) if turned else (lines, tiles)
    sequences, heads = (max(each.shape[place] for each in given) for place in range(2))
    lists = unused.new_empty(sequences, heads, lines, tiles, dtype=torch.int32)
    counts = unused.new_empty(sequences, heads, lines, 2, dtype=torch.int32)
    masks = {name: launch[name] for name in ("ROWS", "KEYS", "CAUSAL", "INTERVALS", "BITS")}
    schedule_kernel[(lines, heads, sequences)](
        lists, counts, *(counts if each is None else each for each in plan[:2]), *plan.strides,
        queries, keys, int(call.position), tiles, TURNED=turned, **masks, **schedule_options(),
    )  # fmt: skip
    return Schedule(lists, counts, (heads * lines if sequences > 1 else 0, lines if heads > 1 else 0))


def schedule_options() -> dict[str, Any]:
    """Return how the schedule is compiled."""
    return {"SOME": SOME, "num_warps": 4, "enable_fp_fusion": True}


def _strides(tensor: Tensor) -> list[int]:
    return [tensor.stride(place) if tensor.shape[place] > 1 else 0 for place in range(2)]
