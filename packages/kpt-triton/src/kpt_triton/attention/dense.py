"""`attention.dense` under any mask, with whatever changes scores, sinks and the log-sum-exp; its gradients beside it.

A program has a tile of the queries of one head. It goes through the tiles of keys that no mask touches, then through
those that one does; of a plan with tensors, a first launch lists which these are (`kpt_triton.attention.mask`). Where
such programs would leave most of a chip idle, keys are split over more of them (`kpt_triton.attention.few`). Nothing is
read on the host, so that a launch may be captured and replayed.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.chips import INTERPRETER, chip_of
from kpt_triton.contracts import BF16, FP16, FP32, integers, pointers, products, spilling
from kpt_triton.launching import on_its_device
from kpt_triton.numeric import narrow

from . import backward as gradients
from . import few
from .mask import OF_TOKENS, schedule, schedule_kernel, schedule_options, tensors_of, tiles_of
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
    with_tile,
)

#: The gradients of what `forward` gives.
backward = gradients.backward
#: Rows, keys, stages and warps of a tile by a chip's family, for heads of up to 64, 128 and 256.
_TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "sm80": ((128, 32, 3, 8), (128, 32, 3, 8), (64, 32, 2, 8)),
    "sm86": ((128, 32, 3, 8), (128, 32, 3, 8), (64, 32, 2, 8)),
    "sm90": ((128, 64, 3, 8), (128, 64, 3, 8), (128, 64, 2, 8)),
    "sm100": ((128, 64, 3, 8), (128, 32, 3, 8), (64, 64, 2, 8)),
    "sm120": ((128, 32, 3, 8), (64, 32, 3, 8), (64, 16, 2, 8)),
    "gfx9": ((128, 32, 1, 4), (128, 32, 1, 4), (64, 32, 1, 4)),
    # Operands of products are twice in its registers: heads of 256 would spill 1,200 bytes.
    "gfx11": ((64, 32, 1, 4), (64, 16, 1, 8)),
    "gfx12": ((64, 32, 1, 4), (64, 16, 1, 8), (32, 16, 1, 8)),
    "xe": ((128, 64, 2, 16), (128, 64, 2, 16), (64, 32, 2, 16)),
}


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return "there is nothing to compute"
    dim = max(call.q.shape[3], call.v.shape[3])
    if dim > (most := _most_dim(chip := chip_of(call.q.device))):
        return f"head_dim {dim}; this kernel holds up to {most} on {chip}"
    if call.needs and call.q.shape[2] < few.LEAST_QUERIES:
        return f"{call.q.shape[2]} queries; with gradients this kernel does not split keys, which few of them need"
    if call.dropout:
        return "dropout; this kernel drops nothing"
    if call.relative_bias is not None:
        return "relative_bias; this kernel adds bias and alibi_slopes"
    if reason := gradients.refused(call):
        return reason
    if call.intervals is not None and not call.intervals.shape[3]:
        return "a plan of no intervals, by which nobody sees anything"
    changed = (call.alibi_slopes, call.sinks, call.intervals, call.blocks)
    # For few queries and a bias PyTorch repeats the keys for each head, and splits none.
    biased = call.bias is not None and (call.causal or call.q.shape[2] < few.LEAST_QUERIES)
    more = call.softcap or call.return_lse or biased
    if not more and all(each is None for each in changed):
        return "nothing but causality or a bias, which scaled_dot_product_attention of torch is for"
    return None


@triton.jit(do_not_specialize=OF_TOKENS)
def _forward_kernel(
    q, k, v, out, lse, largest, sums, sinks, slopes, bias, lists, counts, intervals, table, bits,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_bb, stride_bh, stride_bm, stride_bn, stride_lb, stride_lh,
    stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    groups, queries, keys, position, tiles, scale, cap,
    SAVES: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr,
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
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total += tl.where(sink > LOWEST, 1.0, tl.where(sink == sink, 0.0, sink))  # NaN stays
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2E
    place = batch * stride_lb + head * stride_lh + line
    fulls, begin, end = tiles_of(lists, counts, place, line, queries, keys, position, tiles, ROWS, KEYS, CAUSAL, LISTED)
    lists += place * tiles
    for i in tl.range(0, fulls, num_stages=STAGES):
        start = i * KEYS
        if LISTED:
            start = tl.load(lists + i) * KEYS
        acc, total, top = with_tile(
            acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside, queries, keys,
            position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS, VALUE_DIM,
            VALUES, KEYS, False, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
        )  # fmt: skip
    for i in tl.range(begin, end, num_stages=1):  # few; what waits for them would spill
        start = i * KEYS
        if LISTED:
            start = tl.load(lists + i) * KEYS
        acc, total, top = with_tile(
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
    top = tl.maximum(top, LOWEST)
    found = (top + tl.log2(total)) * LN2
    tl.store(lse + place, tl.where(dead, float("-inf"), found), mask=inside)
    if SAVES:
        tl.store(largest + place, tl.where(dead, LOWEST, top * LN2), mask=inside)
        tl.store(sums + place, total, mask=inside)


@on_its_device
def forward(call: Any) -> Any:
    """Return the output and, where it is asked for, the log-sum-exp; and what the gradients need."""
    launch = _launch_of(call)
    batch, heads, queries, _ = call.q.shape
    if few.serves(call, triton.cdiv(queries, launch["ROWS"]) * heads * batch, launch["num_warps"]):
        return few.forward(call)
    return attend(call, launch)


def attend(call: Any, launch: Mapping[str, Any]) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
    """Return what `forward` does.

    Args:
        call: of the op.
        launch: what the kernel is launched with, from `_launch_of`.
    """
    q, k, v = (each.detach() for each in (call.q, call.k, call.v))
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    lines, tiles = triton.cdiv(queries, launch["ROWS"]), triton.cdiv(keys, launch["KEYS"])
    out, lse = q.new_empty(batch, heads, queries, v.shape[3]), q.new_empty(batch, heads, queries, dtype=torch.float32)
    largest, sums = lse.new_empty(2, *lse.shape) if call.needs else (lse, lse)
    plan = tensors_of(call)
    listed = schedule(call, launch, plan, lse)
    _, scale, cap = scales_of(call)
    bias = bias_of(call)
    given = (numbers(call.sinks), numbers(call.alibi_slopes), bias, listed.lists, listed.counts, *plan[:3])
    _forward_kernel[(lines, heads, batch)](
        q, k, v, out, lse, largest, sums, *(lse if each is None else each for each in given),
        *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0, 0) if bias is None else bias.stride()), *listed.strides,
        *plan.strides, heads // k.shape[1], queries, keys, int(call.position), tiles, scale, cap, **launch,
    )  # fmt: skip
    return (out, lse if call.return_lse else None), (out, largest, sums) if call.needs else ()


def _launch_of(call: Any) -> dict[str, Any]:
    """Return what the kernel is launched with for a call."""
    options = {"SAVES": bool(call.needs), "SINKS": call.sinks is not None, **options_of(call)}
    return options | _sizes(chip_of(call.q.device), call.q.shape[3], call.v.shape[3])


def _most_dim(chip: str) -> int:
    """Return the largest head_dim, which is padded to a power of two."""
    return 32 << len(_TILES[narrow_family_of(chip)])


def _sizes(chip: str, dim: int, value_dim: int) -> dict[str, Any]:
    """Return what the kernel is compiled for by shapes, and how."""
    sizes = padded(dim, value_dim)
    most = max(sizes["DIMS"], sizes["VALUES"])
    rows, keys, stages, warps = _TILES[narrow_family_of(chip)][(most > 64) + (most > 128)]
    if chip == INTERPRETER:
        rows, keys = 32, 64  # so that small cases have several
    return sizes | {"ROWS": rows, "KEYS": keys, "STAGES": stages, "num_warps": warps, "enable_fp_fusion": True}


def _signature(dtype: str) -> dict[str, str]:
    """Return the types of the kernel's arguments: contiguous tensors whose rows are multiples of 16 numbers."""
    strides = [f"stride_{tensor}{place}" for tensor in "qkvb" for place in ("b", "h", "m" if tensor in "qb" else "n")]
    return {
        **pointers("q k v out", dtype), **pointers("lse largest sums sinks slopes bias", FP32),
        **pointers("lists counts intervals table", "i32"), **pointers("bits", "i64"),
        **integers(" ".join(strides)), **integers("stride_qd stride_kd stride_vd stride_bn", ":1"),
        **integers("stride_lb stride_lh stride_ib stride_ih stride_tb stride_th stride_tm", ""),
        **integers("groups queries keys position tiles", ""), "scale": FP32, "cap": FP32,
    }  # fmt: skip


def _program(
    name: str, dtype: str, dims: tuple[int, ...], masks: tuple[str, ...], spilled: Mapping[str, int], hot: int = 0
) -> Program:
    more = {mask: dict.fromkeys(("SAVES", "SINKS"), mask == "everything") for mask in USUAL}

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {
            f"{dim}, {mask}": {**PLAIN, **USUAL[mask], **more[mask], **_sizes(chip, dim, dim)}
            for dim in dims
            for mask in masks
        }

    contracts = spilling(products(dtype), spilled, hot)
    return Program(name, _forward_kernel, _signature(dtype), contracts, launches)


def _schedule_launches(chip: str) -> dict[str, Mapping[str, Any]]:
    masks = {name: USUAL["everything"][name] for name in ("CAUSAL", "INTERVALS", "BITS")}
    return {
        f"{rows} by {keys}{', turned' * turned}": {
            "ROWS": rows, "KEYS": keys, "TURNED": turned, **masks, **schedule_options()
        }
        for rows, keys, turned in ((128, 64, False), (64, 32, False), (64, 128, True))
    }  # fmt: skip


_OF_SCHEDULE = {
    **pointers("lists counts intervals table", "i32"),
    **integers("stride_ib stride_ih stride_tb stride_th stride_tm queries keys position tiles", ""),
}
#: Bytes that may be spilled: on NVIDIA's chips in the loop of tiles with a mask; the other one is what takes the time.
_SPILLED = {"sm90": 192, "gfx1100": 128}
#: The same where heads have 256 numbers.
_SPILLED_OF_WIDE = {"sm80": 48, "sm90": 512}
#: What is compiled ahead of time.
AOT = (
    _program("forward bf16", BF16, (64, 128), tuple(USUAL), _SPILLED),
    _program("forward bf16, wide", BF16, (256,), ("documents", "everything"), _SPILLED_OF_WIDE, hot=80),
    _program("forward fp16", FP16, (128,), ("documents",), _SPILLED),
    Program("schedule", schedule_kernel, _OF_SCHEDULE, NO_SPILLS, _schedule_launches),
    *few.AOT,
    *gradients.AOT,
)
