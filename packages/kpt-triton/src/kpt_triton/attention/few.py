"""`attention.dense` of few queries, as steps of decoding have: the keys are split over programs, and each is read once.

A program has a sequence, a head of the keys and a part of them; its rows are the queries of all heads that share these.
Where there is more than one part, a second launch merges them. How many there are follows from shapes and the device,
never from a plan: so nothing is read on the host, and a launch may be captured and replayed. There is no schedule of
tiles either, which would be one more launch: a program finds the keys that its rows see from causality and intervals,
and divides these. Keys that bits alone hide are not read, but they count when keys are divided.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.chips import chip_of
from kpt_triton.contracts import BF16, FP16, FP32, integers, pointers, products, spilling, unaligned
from kpt_triton.launching import programs
from kpt_triton.numeric import narrow

from .mask import OF_TOKENS, tensors_of
from .scores import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    USUAL,
    bias_of,
    narrow_family_of,
    numbers,
    options_of,
    padded,
    scales_of,
    step_of,
    with_tile,
)

#: Queries below which a program for each head is too few of them, whatever the chip.
LEAST_QUERIES = 16
#: Rows of a program: products of matrices have 16 or more.
_LEAST_ROWS, _MOST_ROWS = 16, 32
#: Parts of the keys, and the least steps that one has.
_MOST_PARTS, _LEAST_STEPS = 128, 2
#: Warps for which places on the chip are counted: twice those of a program, since its steps fill shared memory.
_WARPS = 8
#: Numbers of parts that are merged at a time.
_MERGED = 8192


def serves(call: Any, tiles: int, warps: int) -> bool:
    """Return whether keys are to be split, which follows from shapes and the device alone.

    Args:
        call: of the op.
        tiles: programs that would have a tile of one head's queries, and all keys.
        warps: of each of these.
    """
    if call.needs:  # what gradients are made from is not saved
        return False
    if call.q.shape[2] < LEAST_QUERIES:
        return True
    return 2 * tiles <= programs(call.q.device, 2 * tiles, warps) and parts_of(call, _launch_of(call)) > 1


def parts_of(call: Any, launch: Mapping[str, Any]) -> int:
    """Return into how many parts a call's keys are split, so that each has some."""
    steps = triton.cdiv(call.k.shape[2], launch["KEYS"])
    most = min(_MOST_PARTS, triton.cdiv(steps, _LEAST_STEPS))
    work = _work(call, launch)
    # No more than are on the chip at the same time: all take as long, and a few more would take as long again.
    count = max(1, min(most, programs(call.q.device, work * most, _WARPS) // work))
    return int(triton.cdiv(steps, triton.cdiv(steps, count)))


def _work(call: Any, launch: Mapping[str, Any]) -> int:
    """Return how many programs have one part of the keys."""
    (batch, heads, queries, _), kv_heads = call.q.shape, call.k.shape[1]
    return int(batch * kv_heads * triton.cdiv(heads // kv_heads * queries, launch["ROWS"]))


@triton.jit
def _finish(acc, total, top, place, inside, out, lse, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr):
    """Write rows whose weights, powers of 2 of scores less `top`, sum up to `total`."""
    dead = total == 0
    total = tl.where(dead, 1.0, total)
    values = tl.arange(0, VALUES)
    written = inside[:, None] & (values < VALUE_DIM)[None, :]
    result = narrow(acc / total[:, None], out.dtype.element_ty)
    tl.store(out + place[:, None] * VALUE_DIM + values[None, :], result, mask=written)
    found = (tl.maximum(top, LOWEST) + tl.log2(total)) * LN2
    tl.store(lse + place, tl.where(dead, float("-inf"), found), mask=inside)


@triton.jit(do_not_specialize=OF_TOKENS)
def _split_kernel(
    q, k, v, out, lse, parts, tops, sums, sinks, slopes, bias, intervals, table, bits,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_bb, stride_bh, stride_bm, stride_bn,
    stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    kv_heads, groups, queries, keys, position, scale, cap,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of the keys; WHOLE: there is but one, and its result is the op's. Units as in `dense`."""
    count = queries * groups
    blocks = tl.cdiv(count, ROWS)
    work = tl.program_id(0)
    batch = (work // (blocks * kv_heads)).to(tl.int64)
    kv_head = (work // blocks % kv_heads).to(tl.int64)
    line = work % blocks * ROWS
    # Query by query, so that a tile has few of them. Rows past the last one are the first one's, of which all is there.
    place = line + tl.arange(0, ROWS)
    inside = place < count
    place = tl.where(inside, place, 0)
    row = place // groups
    head = kv_head * groups + place % groups
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    at = q + batch * stride_qb + (head * stride_qh + row.to(tl.int64) * stride_qm)[:, None] + dims[None, :] * stride_qd
    rows = tl.load(at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    k += batch * stride_kb + kv_head * stride_kh
    v += batch * stride_vb + kv_head * stride_vh
    intervals += batch * stride_ib + head * stride_ih
    table += batch * stride_tb + head * stride_th + (row // 128).to(tl.int64) * stride_tm
    bias += batch * stride_bb + (head * stride_bh)[:, None]
    slope = 0.0
    if SLOPES:
        slope = (tl.load(slopes + head).to(tl.float32) * LOG2E)[:, None]
    part = tl.program_id(1)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:  # of the first part, so that merging knows nothing of them
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        sink = tl.where(part == 0, sink, float("-inf"))
        top = tl.maximum(top, sink)
        total += tl.where(sink > LOWEST, 1.0, tl.where(sink == sink, 0.0, sink))  # NaN stays
    # Keys from `low` to `high` are those that some row may see; `least` to `most` those that all rows do.
    low = 0
    high = keys
    least = 0
    most = keys
    if CAUSAL:
        high = tl.maximum(tl.minimum(high, (tl.minimum(line + ROWS, count) - 1) // groups + position + 1), 0)
        most = tl.maximum(tl.minimum(most, line // groups + position + 1), 0)
    if INTERVALS > 0:
        begins = tl.zeros_like(row) + keys
        ends = tl.zeros_like(row)
        for i in range(INTERVALS):
            of_row = intervals + (row.to(tl.int64) * INTERVALS + i) * 2
            begin = tl.load(of_row)
            end = tl.load(of_row + 1)
            begins = tl.minimum(begins, tl.where(begin < end, begin, keys))
            ends = tl.maximum(ends, tl.where(begin < end, end, 0))
            least = tl.maximum(least, tl.max(begin, 0))
            most = tl.maximum(tl.minimum(most, tl.min(end, 0)), 0)
        low = tl.maximum(tl.min(begins, 0), 0)
        high = tl.minimum(high, tl.max(ends, 0))
    first = low // KEYS
    tiles = tl.maximum(tl.cdiv(high, KEYS) - first, 0)
    each = tl.cdiv(tiles, tl.num_programs(1))
    start = first + tl.minimum(part * each, tiles)
    stop = first + tl.minimum(part * each + each, tiles)
    left = 0
    past = start
    if not BITS and INTERVALS < 2:
        full = tl.minimum(tl.maximum(tl.cdiv(least, KEYS), start), stop)
        past = tl.maximum(tl.minimum(most // KEYS, stop), full)
        left = full - start
        for i in tl.range(full, past, num_stages=STAGES):
            acc, total, top = with_tile(
                acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, i * KEYS, row, inside, queries,
                keys, position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS,
                VALUE_DIM, VALUES, KEYS, False, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
            )  # fmt: skip
    # The tiles before the full ones and past them: few, but where nothing tells which ones are full.
    ahead: tl.constexpr = STAGES if BITS or INTERVALS > 1 else 1
    for i in tl.range(0, left + stop - past, num_stages=ahead):
        tile = tl.where(i < left, start + i, past + i - left)
        acc, total, top = with_tile(
            acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, tile * KEYS, row, inside, queries,
            keys, position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS,
            VALUE_DIM, VALUES, KEYS, True, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
        )  # fmt: skip
    place = (batch * kv_heads * groups + head) * queries + row
    if WHOLE:
        _finish(acc, total, top, place, inside, out, lse, VALUE_DIM, VALUES)
    else:
        place = place * tl.num_programs(1) + part
        written = inside[:, None] & (values < VALUE_DIM)[None, :]
        tl.store(parts + place[:, None] * VALUE_DIM + values[None, :], acc, mask=written)
        tl.store(tops + place, top, mask=inside)
        tl.store(sums + place, total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _merge_kernel(
    parts, tops, sums, out, lse, count,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The `count` parts of one query and head, MERGED at a time; PARTS: the most that there are."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + place * count + part, mask=part < count, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.maximum(highest, LOWEST)
    total = tl.sum(tl.load(sums + place * count + part, mask=part < count, other=0.0) * tl.exp2(top - base), 0)
    values = tl.arange(0, VALUES)
    acc = tl.zeros((VALUES,), tl.float32)
    for start in range(0, count, MERGED):
        some = start + tl.arange(0, MERGED)
        weight = tl.exp2(tl.load(tops + place * count + some, mask=some < count, other=float("-inf")) - base)
        read = (some < count)[:, None] & (values < VALUE_DIM)[None, :]
        found = tl.load(parts + (place * count + some)[:, None] * VALUE_DIM + values[None, :], mask=read, other=0.0)
        acc += tl.sum(found * weight[:, None], 0)
    one = tl.arange(0, 1)
    nothing = tl.zeros((1,), tl.float32)
    _finish(acc[None, :], total + nothing, highest + nothing, place + one, one == 0, out, lse, VALUE_DIM, VALUES)


def forward(call: Any) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
    """Return the output and, where it is asked for, the log-sum-exp; nothing for gradients."""
    launch = _launch_of(call)
    return attend(call, parts_of(call, launch), launch)


def attend(call: Any, count: int, launch: Mapping[str, Any]) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
    """Return what `forward` does.

    Args:
        call: of the op.
        count: parts of the keys.
        launch: what the first kernel is launched with, from `_launch_of`.
    """
    q, k, v = (each.detach() for each in (call.q, call.k, call.v))
    (batch, heads, queries, _), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    out, lse = q.new_empty(batch, heads, queries, value_dim), q.new_empty(batch, heads, queries, dtype=torch.float32)
    if count == 1:
        parts = tops = sums = lse  # not written
    else:
        parts = lse.new_empty(*lse.shape, count, value_dim)
        tops, sums = lse.new_empty(2, *lse.shape, count)
    plan = tensors_of(call)
    _, scale, cap = scales_of(call)
    bias = bias_of(call)
    given = (numbers(call.sinks), numbers(call.alibi_slopes), bias, *plan[:3])
    _split_kernel[(_work(call, launch), count)](
        q, k, v, out, lse, parts, tops, sums, *(lse if each is None else each for each in given),
        *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0, 0) if bias is None else bias.stride()), *plan.strides,
        kv_heads, heads // kv_heads, queries, keys, int(call.position), scale, cap, WHOLE=count == 1, **launch,
    )  # fmt: skip
    if count > 1:
        sizes = {name: launch[name] for name in ("VALUE_DIM", "VALUES")}
        _merge_kernel[(lse.numel(),)](parts, tops, sums, out, lse, count, **sizes, **_merge_options(launch["VALUES"]))
    return (out, lse if call.return_lse else None), ()


def _launch_of(call: Any) -> dict[str, Any]:
    """Return what the first kernel is launched with for a call, but WHOLE."""
    (_, heads, queries, dim), (_, kv_heads, _, value_dim) = call.q.shape, call.v.shape
    rows = heads // kv_heads * queries
    sizes = _sizes(chip_of(call.q.device), call.q.element_size(), rows, dim, value_dim)
    return {"SINKS": call.sinks is not None, **options_of(call), **sizes}


def _sizes(chip: str, itemsize: int, rows: int, dim: int, value_dim: int) -> dict[str, Any]:
    """Return what the first kernel is compiled for by shapes, and how; `rows` share a head of the keys."""
    sizes = padded(dim, value_dim)
    largest = max(sizes["DIMS"], sizes["VALUES"])
    keys, stages, warps = step_of(chip, itemsize, largest)
    # More rows of float32, or of larger heads, are more than registers hold.
    most = _LEAST_ROWS if itemsize == 4 else _MOST_ROWS * 128 // max(128, largest)
    fitting = min(max(triton.next_power_of_2(rows), _LEAST_ROWS), most)
    return sizes | {"ROWS": fitting, "KEYS": keys, "STAGES": stages, "num_warps": warps, "enable_fp_fusion": True}


def _merge_options(values: int) -> dict[str, Any]:
    return {"PARTS": _MOST_PARTS, "MERGED": min(_MOST_PARTS, _MERGED // values), "num_warps": 4,
            "enable_fp_fusion": True}  # fmt: skip


def _signature(dtype: str) -> dict[str, str]:
    """Return the types of the first kernel's arguments: contiguous tensors whose rows are multiples of 16 numbers."""
    strides = [f"stride_{tensor}{place}" for tensor in "qkvb" for place in ("b", "h", "m" if tensor in "qb" else "n")]
    return {
        **pointers("q k v out", dtype), **pointers("lse parts tops sums sinks slopes bias", FP32),
        **pointers("intervals table", "i32"), **pointers("bits", "i64"),
        **integers(" ".join(strides)), **integers("stride_qd stride_kd stride_vd stride_bn", ":1"),
        **integers("stride_ib stride_ih stride_tb stride_th stride_tm", ""),
        **integers("kv_heads groups queries keys position", ""), "scale": FP32, "cap": FP32,
    }  # fmt: skip


#: Rows, numbers of a head, and what calls have.
_Usual = tuple[int, int, Mapping[str, Any]]


def _program(name: str, dtype: str, contracts: Mapping[str, str], calls: Mapping[str, _Usual]) -> Program:

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {
            case: {**PLAIN, "SINKS": False, "WHOLE": False, **more, **_sizes(chip, 2, rows, dim, dim)}
            for case, (rows, dim, more) in calls.items()
            # RDNA 3 keeps operands of products twice, and `dense` refuses larger heads there.
            if dim <= 128 or narrow_family_of(chip) != "gfx11"
        }

    return Program(name, _split_kernel, _signature(dtype), contracts, launches)


def _merge_program(dtype: str) -> Program:
    signature = {**pointers("parts tops sums lse", FP32), **pointers("out", dtype), **integers("count", "")}

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {str(dim): {"VALUE_DIM": dim, "VALUES": dim, **_merge_options(dim)} for dim in (64, 128, 256)}

    return Program(f"merge few {dtype}", _merge_kernel, signature, NO_SPILLS, launches)


_USUAL_CALLS: dict[str, _Usual] = {
    "128, bits": (4, 128, {"BITS": True}),
    "128, a window": (4, 128, {"CAUSAL": True, "INTERVALS": 1}),
    "128, 32 rows, causal": (32, 128, {"CAUSAL": True}),
    "128, 32 rows, bits": (32, 128, {"BITS": True}),
    "64, 32 rows, sinks": (32, 64, {"SINKS": True, "CAUSAL": True, "INTERVALS": 1}),
    "256, softcap, whole": (4, 256, {"CAPPED": True, "BITS": True, "WHOLE": True}),
}
#: Several intervals are a loop in the loop of tiles, which Triton then does not load ahead.
_EVERYTHING: dict[str, _Usual] = {"128, everything": (4, 128, {"SINKS": True, **USUAL["everything"]})}
#: Bytes that may be spilled: 32 rows and bits by Triton 3.6, none by 3.9.
_SPILLED = {"sm90": 96}
#: What is compiled ahead of time.
AOT = (
    _program("few bf16", BF16, spilling(products(BF16, tall=False), _SPILLED), _USUAL_CALLS),
    _program("few fp16", FP16, spilling(products(FP16, tall=False), _SPILLED), _USUAL_CALLS),
    _program("few bf16, everything", BF16, unaligned(BF16, tall=False), _EVERYTHING),
    _merge_program(BF16),
)
