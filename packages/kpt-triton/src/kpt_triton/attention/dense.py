"""`attention.dense` without gradients: any mask, whatever changes scores, sinks, the log-sum-exp.

A program has a tile of the queries of one head. It goes through the tiles of keys that no mask touches, then through
those that one does; of a plan with tensors, a first launch lists which these are (`kpt_triton.attention.mask`). Nothing
is read on the host, so that a launch may be captured and replayed.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.chips import INTERPRETER, chip_of, family_of
from kpt_triton.contracts import BF16, FP16, FP32, integers, pointers, products
from kpt_triton.launching import inner_contiguous, on_its_device
from kpt_triton.numeric import dot, narrow

from .mask import allowed, schedule_kernel
from .scores import LOWEST, numbers, single, tanh

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
#: The largest head_dim, which is padded to a power of two.
_MOST_DIM = 128
#: Queries below which a program for each head is too few of them.
_LEAST_QUERIES = 16
#: Rows and columns of a block of a plan.
_BLOCK = 128
#: Tiles of keys that the schedule looks at at once.
_SOME = 32
#: Rows, keys, stages and warps of a tile by a chip's family, for heads of up to 64 and 128.
_TILES = {
    "sm80": ((128, 32, 3, 8), (128, 32, 3, 8)),
    "sm86": ((128, 32, 3, 8), (128, 32, 3, 8)),
    "sm90": ((128, 64, 3, 8), (128, 64, 3, 8)),
    "sm100": ((128, 64, 3, 8), (128, 32, 3, 8)),
    "sm120": ((128, 32, 3, 8), (64, 32, 3, 8)),
    "gfx9": ((128, 32, 1, 4), (128, 32, 1, 4)),
    "gfx11": ((64, 32, 1, 4), (64, 16, 1, 8)),
    "xe": ((128, 64, 2, 16), (128, 64, 2, 16)),
}


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return "there is nothing to compute"
    dim = max(call.q.shape[3], call.v.shape[3])
    if dim > _MOST_DIM:
        return f"head_dim {dim}; this kernel holds up to {_MOST_DIM}"
    if call.q.shape[2] < _LEAST_QUERIES:
        return f"{call.q.shape[2]} queries; this kernel does not split keys, which few of them need"
    if call.dropout:
        return "dropout; this kernel is for inference"
    if call.relative_bias is not None:
        return "relative_bias; this kernel adds bias and alibi_slopes"
    if call.intervals is not None and not call.intervals.shape[3]:
        return "a plan of no intervals, by which nobody sees anything"
    changed = (call.alibi_slopes, call.sinks, call.intervals, call.blocks)
    more = call.softcap or call.return_lse or (call.causal and call.bias is not None)
    if not more and all(each is None for each in changed):
        return "nothing but causality or a bias, which scaled_dot_product_attention of torch is for"
    return None


@triton.jit
def _tile(
    acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside, queries, keys,
    position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits,
    DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr, CAPPED: tl.constexpr,
    SLOPES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys brings; `top` and scores are in units of log 2."""
    key = start + tl.arange(0, KEYS)
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    at_k = k + key.to(tl.int64)[:, None] * stride_kn + dims[None, :] * stride_kd
    at_v = v + key.to(tl.int64)[:, None] * stride_vn + values[None, :] * stride_vd
    if MASKED:
        seen = allowed(row, inside, start, keys, position, intervals, table, bits, KEYS, CAUSAL, INTERVALS, BITS)
        # What no row sees has no influence, NaN neither.
        some = tl.max(seen.to(tl.int32), 0) > 0
        k_tile = tl.load(at_k, mask=some[:, None] & (dims < DIM)[None, :], other=0.0)
        v_tile = tl.load(at_v, mask=some[:, None] & (values < VALUE_DIM)[None, :], other=0.0)
    elif DIM == DIMS and VALUE_DIM == VALUES:
        k_tile = tl.load(at_k)
        v_tile = tl.load(at_v)
    else:
        k_tile = tl.load(at_k, mask=(dims < DIM)[None, :], other=0.0)
        v_tile = tl.load(at_v, mask=(values < VALUE_DIM)[None, :], other=0.0)
    scores = dot(rows, k_tile.T, tl.zeros((rows.shape[0], KEYS), tl.float32), "ieee") * scale
    if CAPPED:
        scores = tanh(scores) * cap
    if SLOPES:
        scores -= slope * tl.abs(key[None, :] - (row + position)[:, None]).to(tl.float32)
    if BIAS:
        at = bias + row.to(tl.int64)[:, None] * stride_bm + key.to(tl.int64)[None, :] * stride_bn
        added = tl.load(at, mask=inside[:, None] & (key < keys)[None, :], other=0.0).to(tl.float32)
        scores += added * _LOG2E
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.maximum(higher, LOWEST)
    weights = tl.exp2(scores - base[:, None])
    fading = tl.exp2(top - base)
    total = total * fading + tl.sum(weights, 1)
    acc = dot(narrow(weights, v_tile.dtype), v_tile, acc * fading[:, None], "ieee")
    return acc, total, higher


@triton.jit(do_not_specialize=["queries", "keys", "position", "tiles", "stride_lb", "stride_lh"])
def _forward_kernel(
    q, k, v, out, lse, sinks, slopes, bias, lists, counts, intervals, table, bits,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_bb, stride_bh, stride_bm, stride_bn, stride_lb, stride_lh,
    stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    groups, queries, keys, position, tiles, scale, cap,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr,
    INTERVALS: tl.constexpr, BITS: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries. Products times `scale` are scores in units of log 2 or, CAPPED, arguments of the tangent."""
    LISTED: tl.constexpr = INTERVALS > 0 or BITS
    # The longest rows first.
    line = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = line * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    at = q + batch * stride_qb + head * stride_qh + row.to(tl.int64)[:, None] * stride_qm + dims[None, :] * stride_qd
    rows = tl.load(at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    k += batch * stride_kb + (head // groups) * stride_kh
    v += batch * stride_vb + (head // groups) * stride_vh
    bias += batch * stride_bb + head * stride_bh
    intervals += batch * stride_ib + head * stride_ih
    table += batch * stride_tb + head * stride_th + (line * ROWS // 128).to(tl.int64) * stride_tm
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
        total += tl.where(sink > LOWEST, 1.0, tl.where(sink == sink, 0.0, sink))  # NaN stays
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head).to(tl.float32) * _LOG2E
    if LISTED:
        place = batch * stride_lb + head * stride_lh + line
        lists += place * tiles
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
    for i in tl.range(0, fulls, num_stages=STAGES):
        start = i * KEYS
        if LISTED:
            start = tl.load(lists + i) * KEYS
        acc, total, top = _tile(
            acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside, queries, keys,
            position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS, VALUE_DIM,
            VALUES, KEYS, False, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
        )  # fmt: skip
    for i in tl.range(begin, end, num_stages=1):  # few; what waits for them would spill
        start = i * KEYS
        if LISTED:
            start = tl.load(lists + i) * KEYS
        acc, total, top = _tile(
            acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside, queries, keys,
            position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS, VALUE_DIM,
            VALUES, KEYS, True, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
        )  # fmt: skip
    dead = total == 0
    total = tl.where(dead, 1.0, total)
    place = ((batch * tl.num_programs(1) + head) * queries + row).to(tl.int64)
    written = inside[:, None] & (values < VALUE_DIM)[None, :]
    result = narrow(acc / total[:, None], out.dtype.element_ty)
    tl.store(out + place[:, None] * VALUE_DIM + values[None, :], result, mask=written)
    found = (tl.maximum(top, LOWEST) + tl.log2(total)) * _LN2
    tl.store(lse + place, tl.where(dead, float("-inf"), found), mask=inside)


@on_its_device
def forward(call: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, where it is asked for, the log-sum-exp."""
    return attend(call, _launch_of(call))


def attend(call: Any, launch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return what `forward` does.

    Args:
        call: of the op.
        launch: what the kernel is launched with, from `_launch_of`.
    """
    q, k, v = (each.detach() for each in (call.q, call.k, call.v))
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    lines, tiles = triton.cdiv(queries, launch["ROWS"]), triton.cdiv(keys, launch["KEYS"])
    out, lse = q.new_empty(batch, heads, queries, v.shape[3]), q.new_empty(batch, heads, queries, dtype=torch.float32)
    plan = _tensors(call)
    lists, counts, of_lists = _schedule(call, launch, plan, lines, tiles, lse)
    scale = dim**-0.5 if call.scale is None else float(call.scale)
    scale = scale / call.softcap if call.softcap else scale * _LOG2E.value
    sinks, slopes = numbers(call.sinks), numbers(call.alibi_slopes)
    bias = None if call.bias is None else single(call.bias).expand(batch, heads, queries, keys)
    intervals, table, bits, of_plan = plan
    _forward_kernel[(lines, heads, batch)](
        q, k, v, out, lse, *(lse if each is None else each for each in (sinks, slopes, bias)), lists, counts,
        *(lse if each is None else each for each in (intervals, table, bits)),
        *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0, 0) if bias is None else bias.stride()), *of_lists, *of_plan,
        heads // k.shape[1], queries, keys, int(call.position), tiles, scale, call.softcap * _LOG2E.value, **launch,
    )  # fmt: skip
    return out, lse if call.return_lse else None


def _schedule(
    call: Any, launch: Mapping[str, Any], plan: Any, lines: int, tiles: int, unused: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return lists of tiles, how many they have, and lines from one sequence and head to the next."""
    intervals, table, _, strides = plan
    given = [each for each in (intervals, table) if each is not None]
    if not given:
        return unused, unused, (0, 0)
    sequences, heads = (max(each.shape[place] for each in given) for place in range(2))
    lists = unused.new_empty(sequences, heads, lines, tiles, dtype=torch.int32)
    counts = unused.new_empty(sequences, heads, lines, 2, dtype=torch.int32)
    masks = {name: launch[name] for name in ("ROWS", "KEYS", "CAUSAL", "INTERVALS", "BITS")}
    schedule_kernel[(lines, heads, sequences)](
        lists, counts, *(counts if each is None else each for each in (intervals, table)), *strides,
        call.q.shape[2], call.k.shape[2], int(call.position), tiles, **masks, **_schedule_options(),
    )  # fmt: skip
    return lists, counts, (heads * lines if sequences > 1 else 0, lines if heads > 1 else 0)


def _tensors(call: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[int, ...]]:
    """Return intervals, blocks and bits as words of a call, and strides of the first two by sequence, head and row."""
    intervals, table, bits = call.intervals, call.blocks, None
    strides = [0, 0, 0, 0, 0]
    if intervals is not None:
        intervals = intervals.contiguous()
        strides[:2] = _strides(intervals)
    if table is not None:
        table = inner_contiguous(table)
        strides[2:] = *_strides(table), table.stride(2)
        held = call.block_bits if len(call.block_bits) else call.block_bits.new_zeros(1, _BLOCK, _BLOCK // 8)
        held = held.contiguous()
        bits = (held.clone() if held.storage_offset() % 8 else held).view(torch.int64)
    return intervals, table, bits, tuple(strides)


def _strides(tensor: Tensor) -> list[int]:
    return [tensor.stride(place) if tensor.shape[place] > 1 else 0 for place in range(2)]


def _launch_of(call: Any) -> dict[str, Any]:
    """Return what the kernel is launched with for a call."""
    options = {
        "SINKS": call.sinks is not None, "SLOPES": call.alibi_slopes is not None, "BIAS": call.bias is not None,
        "CAPPED": call.softcap > 0, "CAUSAL": bool(call.causal), "BITS": call.blocks is not None,
        "INTERVALS": 0 if call.intervals is None else call.intervals.shape[3],
    }  # fmt: skip
    dims = call.q.shape[3], call.v.shape[3]
    return options | _sizes(chip_of(call.q.device), *dims)


def _sizes(chip: str, dim: int, value_dim: int) -> dict[str, Any]:
    """Return what the kernel is compiled for by shapes, and how."""
    dims, values = (max(16, triton.next_power_of_2(each)) for each in (dim, value_dim))
    rows, keys, stages, warps = _TILES[family_of(chip)][max(dims, values) > 64]
    if chip == INTERPRETER:
        rows, keys = 32, 64  # so that small cases have several
    return {
        "DIM": dim, "DIMS": dims, "VALUE_DIM": value_dim, "VALUES": values,
        "ROWS": rows, "KEYS": keys, "STAGES": stages, "num_warps": warps, "enable_fp_fusion": True,
    }  # fmt: skip


def _signature(dtype: str) -> dict[str, str]:
    """Return the types of the kernel's arguments: contiguous tensors whose rows are multiples of 16 numbers."""
    strides = [f"stride_{tensor}{place}" for tensor in "qkvb" for place in ("b", "h", "m" if tensor in "qb" else "n")]
    return {
        **pointers("q k v out", dtype), **pointers("lse sinks slopes bias", FP32),
        **pointers("lists counts intervals table", "i32"), **pointers("bits", "i64"),
        **integers(" ".join(strides)), **integers("stride_qd stride_kd stride_vd stride_bn", ":1"),
        **integers("stride_lb stride_lh stride_ib stride_ih stride_tb stride_th stride_tm", ""),
        **integers("groups queries keys position tiles", ""), "scale": FP32, "cap": FP32,
    }  # fmt: skip


#: What calls may have beside queries, keys and values.
_PLAIN: dict[str, Any] = {
    "SINKS": False, "SLOPES": False, "BIAS": False, "CAPPED": False, "CAUSAL": False, "INTERVALS": 0, "BITS": False
}  # fmt: skip
_USUAL: dict[str, dict[str, Any]] = {
    "causal": {"CAUSAL": True},
    "documents": {"CAUSAL": True, "INTERVALS": 1},
    "bits": {"BITS": True},
    "everything": {name: 2 if name == "INTERVALS" else True for name in _PLAIN},
}


def _program(dtype: str, dims: tuple[int, ...], masks: tuple[str, ...]) -> Program:
    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {
            f"{dim}, {mask}": {**_PLAIN, **_USUAL[mask], **_sizes(chip, dim, dim)} for dim in dims for mask in masks
        }

    # In the loop of tiles with a mask; the other one is what takes the time.
    spilled = {"sm90": 192, "gfx1100": 128}
    contracts = {
        chip: clauses.replace("no spills", f"spills <= {spilled[chip]} B") if chip in spilled else clauses
        for chip, clauses in products(dtype).items()
    }
    return Program(f"forward {dtype}", _forward_kernel, _signature(dtype), contracts, launches)


def _schedule_options() -> dict[str, Any]:
    return {"SOME": _SOME, "num_warps": 4, "enable_fp_fusion": True}


def _schedule_launches(chip: str) -> dict[str, Mapping[str, Any]]:
    masks = {name: _USUAL["everything"][name] for name in ("CAUSAL", "INTERVALS", "BITS")}
    return {
        f"{rows} by {keys}": {"ROWS": rows, "KEYS": keys, **masks, **_schedule_options()}
        for rows, keys in ((128, 64), (64, 32))
    }


_OF_SCHEDULE = {
    **pointers("lists counts intervals table", "i32"),
    **integers("stride_ib stride_ih stride_tb stride_th stride_tm queries keys position tiles", ""),
}
#: What is compiled ahead of time.
AOT = (
    _program(BF16, (64, 128), tuple(_USUAL)),
    _program(FP16, (128,), ("documents",)),
    Program("schedule", schedule_kernel, _OF_SCHEDULE, NO_SPILLS, _schedule_launches),
)
