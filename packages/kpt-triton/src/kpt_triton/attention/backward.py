"""Gradients of `attention.dense`: of queries, keys and values in two passes without atomics, of sinks from their sums.

`_rows_kernel` makes two numbers of each row: its log-sum-exp, and what all its scores' gradients lose. Then a program
has a tile of keys and goes through the tiles of queries that see it (`_keys_kernel`), or a tile of queries and goes
through its keys (`_queries_kernel`). Seven products in place of five, but each sum has one order: the same bits again.
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
from kpt_triton.numeric import dot, narrow

from .mask import OF_TOKENS, allowed, schedule, tensors_of, tiles_of
from .scores import (
    LOG2E,
    LOWEST,
    PLAIN,
    USUAL,
    bias_of,
    modified,
    narrow_family_of,
    numbers,
    options_of,
    padded,
    scales_of,
)

#: Rows of a program of `_rows_kernel`.
_ROWS = 64
#: Rows, keys, stages and warps of a tile by a chip's family, for heads of up to 64 and 128: for a tile of keys.
_KEYS_TILES = {
    "sm80": ((32, 128, 2, 8), (64, 64, 2, 8)),
    "sm86": ((32, 128, 2, 8), (32, 64, 2, 8)),
    "sm90": ((64, 128, 2, 8), (64, 128, 2, 8)),
    "sm100": ((64, 64, 2, 8), (64, 128, 2, 8)),
    "sm120": ((32, 128, 2, 8), (32, 64, 2, 8)),
    "gfx9": ((32, 128, 1, 8), (32, 64, 1, 8)),
    "gfx11": ((16, 64, 1, 8), (16, 64, 1, 8)),
    "gfx12": ((32, 64, 1, 8), (16, 64, 1, 8)),
    "xe": ((64, 128, 2, 16), (64, 128, 2, 16)),
}
#: The same for a tile of queries.
_QUERIES_TILES = {
    "sm80": ((128, 32, 2, 8), (128, 32, 2, 8)),
    "sm86": ((128, 32, 2, 8), (128, 32, 2, 8)),
    "sm90": ((128, 64, 2, 8), (128, 64, 2, 8)),
    "sm100": ((128, 64, 2, 8), (128, 64, 2, 8)),
    "sm120": ((128, 32, 2, 8), (64, 32, 2, 8)),
    "gfx9": ((128, 32, 1, 8), (128, 32, 1, 8)),
    "gfx11": ((64, 32, 1, 8), (64, 16, 1, 8)),
    "gfx12": ((64, 32, 1, 8), (64, 16, 1, 8)),
    "xe": ((128, 64, 2, 16), (64, 64, 2, 16)),
}


def refused(call: Any) -> str | None:
    """Return why another kernel must give a call's gradients, or None."""
    for name in ("bias", "alibi_slopes"):
        if name in call.needs:
            return f"gradients of {name}; this kernel gives those of q, k, v and sinks"
    dim = max(call.q.shape[3], call.v.shape[3])
    if call.needs and dim > (most := _most_dim(chip := chip_of(call.q.device))):
        return f"gradients of heads of {dim}; this kernel gives them for up to {most} on {chip}"
    return None


def _most_dim(chip: str) -> int:
    """Return the largest head: RDNA 3 keeps each operand of a product twice, and would spill 600 bytes of 128."""
    return 64 if chip.startswith("gfx11") else 128


@triton.jit(do_not_specialize=["queries", "stride_lb", "stride_lh"])
def _rows_kernel(
    out, grad, grad_lse, largest, sums, total, lost,
    stride_gb, stride_gh, stride_gm, stride_gd, stride_lb, stride_lh, stride_lm, queries,
    LSE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each row: the log-sum-exp in units of log 2, infinite where it sees nothing, so that its probabilities are 0.

    And the sum of the gradient times the output, less the log-sum-exp's gradient.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    values = tl.arange(0, VALUES)
    place = (batch * tl.num_programs(1) + head) * queries + row
    top = tl.load(largest + place, mask=inside, other=0.0)
    alive = inside & (top != LOWEST)
    whole = tl.load(sums + place, mask=inside, other=1.0)
    read = alive[:, None] & (values < VALUE_DIM)[None, :]
    given = tl.load(out + place[:, None] * VALUE_DIM + values[None, :], mask=read, other=0.0).to(tl.float32)
    at = grad + batch * stride_gb + head * stride_gh + row.to(tl.int64)[:, None] * stride_gm
    found = tl.sum(given * tl.load(at + values[None, :] * stride_gd, mask=read, other=0.0).to(tl.float32), 1)
    if LSE:
        at = grad_lse + batch * stride_lb + head * stride_lh + row.to(tl.int64) * stride_lm
        found -= tl.load(at, mask=alive, other=0.0)
    tl.store(lost + place, found, mask=inside)
    tl.store(total + place, tl.where(alive, top * LOG2E + tl.log2(whole), float("inf")), mask=inside)


@triton.jit
def _load(at, there, dims, DIM: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr):
    """A tile whose rows are `there`; not MASKED, all are."""
    if MASKED:
        return tl.load(at, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM == DIMS:
        return tl.load(at)
    else:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def _add_rows(
    of_k, of_v, k_tile, v_tile, q, grad, total, lost, stride_qm, stride_qd, stride_gm, stride_gd, first, key, start,
    queries, keys, position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, stride_tm,
    DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile of keys what one tile of queries brings; scores are `[keys, rows]`."""
    row = first + tl.arange(0, ROWS)
    inside = row < queries
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    if MASKED:
        of_row = tl.load(total + row, mask=inside, other=float("inf"))
        less = tl.load(lost + row, mask=inside, other=0.0)
    else:
        of_row = tl.load(total + row)
        less = tl.load(lost + row)
    alive = of_row != float("inf")  # what others hold, NaN too, must reach nobody
    at = row.to(tl.int64)[:, None]
    q_tile = _load(q + at * stride_qm + dims[None, :] * stride_qd, alive, dims, DIM, DIMS, MASKED)
    scores, steep = modified(
        dot(k_tile, q_tile.T, tl.zeros((KEYS, ROWS), tl.float32), "ieee"), row[None, :], key[:, None],
        inside[None, :] & (key < keys)[:, None], position, scale, cap, slope, bias, stride_bm, stride_bn,
        CAPPED, SLOPES, BIAS,
    )  # fmt: skip
    weights = tl.exp2(scores - of_row[None, :])
    if MASKED:
        table += (first // 128).to(tl.int64) * stride_tm
        seen = allowed(row, inside, start, keys, position, intervals, table, bits, KEYS, CAUSAL, INTERVALS, BITS, True)
        weights = tl.where(seen, weights, 0.0)
    g_tile = _load(grad + at * stride_gm + values[None, :] * stride_gd, alive, values, VALUE_DIM, VALUES, MASKED)
    of_v = dot(narrow(weights, g_tile.dtype), g_tile, of_v, "ieee")
    change = dot(v_tile, g_tile.T, tl.zeros((KEYS, ROWS), tl.float32), "ieee") - less[None, :]
    change = weights * change * steep
    if MASKED:
        change = tl.where(seen, change, 0.0)
    return dot(narrow(change, q_tile.dtype), q_tile, of_k, "ieee"), of_v


@triton.jit(do_not_specialize=OF_TOKENS)
def _keys_kernel(
    q, k, v, grad, of_k, of_v, total, lost, slopes, bias, lists, counts, intervals, table, bits,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gm, stride_gd,
    stride_bb, stride_bh, stride_bm, stride_bn, stride_lb, stride_lh,
    stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    groups, queries, keys, position, lines, scale, cap, factor,
    SLOPES: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    BITS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of keys and values of one head, through the queries of its group; `factor` is the call's scale."""
    LISTED: tl.constexpr = INTERVALS > 0 or BITS
    tile = tl.program_id(0)
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tile * KEYS
    key = start + tl.arange(0, KEYS)
    there = key < keys
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    at = key.to(tl.int64)[:, None]
    k += batch * stride_kb + kv_head * stride_kh
    v += batch * stride_vb + kv_head * stride_vh
    k_tile = tl.load(
        k + at * stride_kn + dims[None, :] * stride_kd, mask=there[:, None] & (dims < DIM)[None, :], other=0.0
    )
    v_tile = tl.load(
        v + at * stride_vn + values[None, :] * stride_vd, mask=there[:, None] & (values < VALUE_DIM)[None, :], other=0.0
    )
    acc_k = tl.zeros((KEYS, DIMS), tl.float32)
    acc_v = tl.zeros((KEYS, VALUES), tl.float32)
    for group in range(groups):
        head = kv_head * groups + group
        place = (batch * tl.num_programs(1) * groups + head) * queries
        own_q = q + batch * stride_qb + head * stride_qh
        own_grad = grad + batch * stride_gb + head * stride_gh
        own_bias = bias + batch * stride_bb + head * stride_bh
        own_intervals = intervals + batch * stride_ib + head * stride_ih
        own_table = table + batch * stride_tb + head * stride_th
        slope = 0.0
        if SLOPES:
            slope = tl.load(slopes + head).to(tl.float32) * LOG2E
        own_lists = lists
        # Full tiles from `full` to `whole`; those with a mask from `begin` to `near`, then from `far` on.
        full = 0
        whole = queries // ROWS
        begin = 0
        near = 0
        if LISTED:
            line = batch * stride_lb + head * stride_lh + tile
            own_lists = lists + line * lines
            whole = tl.load(counts + line * 2)
            far = lines - tl.load(counts + line * 2 + 1)
        else:
            if CAUSAL:
                begin = tl.minimum(tl.maximum(start - position, 0) // ROWS, lines)
                full = tl.minimum(tl.cdiv(tl.maximum(start + KEYS - 1 - position, 0), ROWS), whole)
                full = tl.maximum(full, begin)
                near = full
            far = tl.maximum(whole, full)
        for i in tl.range(full, whole, num_stages=STAGES):
            first = i * ROWS
            if LISTED:
                first = tl.load(own_lists + i) * ROWS
            acc_k, acc_v = _add_rows(
                acc_k, acc_v, k_tile, v_tile, own_q, own_grad, total + place, lost + place, stride_qm, stride_qd,
                stride_gm, stride_gd, first, key, start, queries, keys, position, scale, cap, slope, own_bias,
                stride_bm, stride_bn, own_intervals, own_table, bits, stride_tm, DIM, DIMS, VALUE_DIM, VALUES, ROWS,
                KEYS, False, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
            )  # fmt: skip
        # One loop for both kinds: two of them would spill.
        for i in tl.range(0, near - begin + lines - far, num_stages=1):
            step = i + begin if i < near - begin else i - (near - begin) + far
            first = step * ROWS
            if LISTED:
                first = tl.load(own_lists + step) * ROWS
            acc_k, acc_v = _add_rows(
                acc_k, acc_v, k_tile, v_tile, own_q, own_grad, total + place, lost + place, stride_qm, stride_qd,
                stride_gm, stride_gd, first, key, start, queries, keys, position, scale, cap, slope, own_bias,
                stride_bm, stride_bn, own_intervals, own_table, bits, stride_tm, DIM, DIMS, VALUE_DIM, VALUES, ROWS,
                KEYS, True, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
            )  # fmt: skip
    at = ((batch * tl.num_programs(1) + kv_head) * keys + key)[:, None]
    written = there[:, None] & (dims < DIM)[None, :]
    tl.store(of_k + at * DIM + dims[None, :], narrow(acc_k * factor, of_k.dtype.element_ty), mask=written)
    written = there[:, None] & (values < VALUE_DIM)[None, :]
    tl.store(of_v + at * VALUE_DIM + values[None, :], narrow(acc_v, of_v.dtype.element_ty), mask=written)


@triton.jit
def _add_keys(
    acc, rows, given, of_row, less, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside, queries, keys,
    position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits,
    DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr, CAPPED: tl.constexpr,
    SLOPES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile of queries what one tile of keys brings."""
    key = start + tl.arange(0, KEYS)
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    some = key >= 0
    if MASKED:
        seen = allowed(row, inside, start, keys, position, intervals, table, bits, KEYS, CAUSAL, INTERVALS, BITS, False)
        some = tl.max(seen.to(tl.int32), 0) > 0  # what no row sees has no influence, NaN neither
    at = key.to(tl.int64)[:, None]
    k_tile = _load(k + at * stride_kn + dims[None, :] * stride_kd, some, dims, DIM, DIMS, MASKED)
    v_tile = _load(v + at * stride_vn + values[None, :] * stride_vd, some, values, VALUE_DIM, VALUES, MASKED)
    scores, steep = modified(
        dot(rows, k_tile.T, tl.zeros((rows.shape[0], KEYS), tl.float32), "ieee"), row[:, None], key[None, :],
        inside[:, None] & (key < keys)[None, :], position, scale, cap, slope, bias, stride_bm, stride_bn,
        CAPPED, SLOPES, BIAS,
    )  # fmt: skip
    change = dot(given, v_tile.T, tl.zeros((rows.shape[0], KEYS), tl.float32), "ieee") - less[:, None]
    change = tl.exp2(scores - of_row[:, None]) * change * steep
    if MASKED:
        change = tl.where(seen, change, 0.0)
    return dot(narrow(change, k_tile.dtype), k_tile, acc, "ieee")


@triton.jit(do_not_specialize=OF_TOKENS)
def _queries_kernel(
    q, k, v, grad, of_q, total, lost, slopes, bias, lists, counts, intervals, table, bits,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gm, stride_gd,
    stride_bb, stride_bh, stride_bm, stride_bn, stride_lb, stride_lh,
    stride_ib, stride_ih, stride_tb, stride_th, stride_tm,
    groups, queries, keys, position, tiles, scale, cap, factor,
    SLOPES: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    BITS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head, through the keys that it sees; `factor` is the call's scale."""
    LISTED: tl.constexpr = INTERVALS > 0 or BITS
    line = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = line * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    place = (batch * tl.num_programs(1) + head) * queries + row
    of_row = tl.load(total + place, mask=inside, other=float("inf"))
    less = tl.load(lost + place, mask=inside, other=0.0)
    alive = of_row != float("inf")
    at = row.to(tl.int64)[:, None]
    at_q = q + batch * stride_qb + head * stride_qh + at * stride_qm + dims[None, :] * stride_qd
    at_grad = grad + batch * stride_gb + head * stride_gh + at * stride_gm + values[None, :] * stride_gd
    rows = _load(at_q, alive, dims, DIM, DIMS, True)
    given = _load(at_grad, alive, values, VALUE_DIM, VALUES, True)
    k += batch * stride_kb + (head // groups) * stride_kh
    v += batch * stride_vb + (head // groups) * stride_vh
    bias += batch * stride_bb + head * stride_bh
    intervals += batch * stride_ib + head * stride_ih
    table += batch * stride_tb + head * stride_th + (line * ROWS // 128).to(tl.int64) * stride_tm
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2E
    fulls, begin, end = tiles_of(
        lists, counts, batch * stride_lb + head * stride_lh + line, line, queries, keys, position, tiles,
        ROWS, KEYS, CAUSAL, LISTED,
    )  # fmt: skip
    lists += (batch * stride_lb + head * stride_lh + line) * tiles
    for i in tl.range(0, fulls, num_stages=STAGES):
        start = i * KEYS
        if LISTED:
            start = tl.load(lists + i) * KEYS
        acc = _add_keys(
            acc, rows, given, of_row, less, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside,
            queries, keys, position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS,
            VALUE_DIM, VALUES, KEYS, False, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
        )  # fmt: skip
    for i in tl.range(begin, end, num_stages=1):
        start = i * KEYS
        if LISTED:
            start = tl.load(lists + i) * KEYS
        acc = _add_keys(
            acc, rows, given, of_row, less, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside,
            queries, keys, position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits, DIM, DIMS,
            VALUE_DIM, VALUES, KEYS, True, CAUSAL, INTERVALS, BITS, CAPPED, SLOPES, BIAS,
        )  # fmt: skip
    written = inside[:, None] & (dims < DIM)[None, :]
    result = narrow(acc * factor, of_q.dtype.element_ty)
    tl.store(of_q + place[:, None] * DIM + dims[None, :], result, mask=written)


@on_its_device
def backward(
    call: Any, saved: tuple[Tensor, Tensor, Tensor], grad: Tensor | None, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """Return the gradients of q, k, v and sinks that are needed.

    Args:
        call: of the op.
        saved: output, largest score and sum of exponentials of each row.
        grad: of the output.
        grad_lse: of the log-sum-exp.
    """
    return gradients(call, saved, grad, grad_lse, launches_of(call))


def gradients(
    call: Any, saved: tuple[Tensor, Tensor, Tensor], grad: Tensor | None, grad_lse: Tensor | None,
    launches: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> dict[str, Tensor]:  # fmt: skip
    """Return what `backward` does; `launches` are what the kernels are launched with, from `launches_of`."""
    out, largest, sums = (each.contiguous() for each in saved)
    q, k, v = (each.detach() for each in (call.q, call.k, call.v))
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    grad = torch.zeros_like(out) if grad is None else grad
    total, lost = sums.new_empty(2, *sums.shape)
    _rows_kernel[(triton.cdiv(queries, _ROWS), heads, batch)](
        out, grad, sums if grad_lse is None else grad_lse, largest, sums, total, lost, *grad.stride(),
        *((0, 0, 0) if grad_lse is None else grad_lse.stride()), queries, LSE=grad_lse is not None,
        **_rows_options(v.shape[3]),
    )  # fmt: skip
    found = {}
    if "sinks" in call.needs:
        sinks = call.sinks.detach()
        weights = torch.exp2(sinks.float()[:, None] * LOG2E.value - total)
        found["sinks"] = -(weights * lost).sum((0, 2)).to(sinks.dtype)
    plan, bias = tensors_of(call), bias_of(call)
    factor, scale, cap = scales_of(call)
    strides = *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *((0,) * 4 if bias is None else bias.stride())
    of_keys, of_queries = launches

    def arguments(launch: Mapping[str, Any], tiles: int, *, turned: bool) -> tuple[Any, ...]:
        listed = schedule(call, launch, plan, sums, turned=turned)
        given = (numbers(call.alibi_slopes), bias, listed.lists, listed.counts, *plan[:3])
        return (
            total, lost, *(sums if each is None else each for each in given), *strides, *listed.strides, *plan.strides,
            heads // k.shape[1], queries, keys, int(call.position), tiles, scale, cap, factor,
        )  # fmt: skip

    if not {"k", "v"}.isdisjoint(call.needs):
        own = {
            name: torch.empty_like(each, memory_format=torch.contiguous_format) for name, each in (("k", k), ("v", v))
        }
        _keys_kernel[(triton.cdiv(keys, of_keys["KEYS"]), k.shape[1], batch)](
            q, k, v, grad, own["k"], own["v"],
            *arguments(of_keys, triton.cdiv(queries, of_keys["ROWS"]), turned=True), **of_keys,
        )  # fmt: skip
        found |= {name: each for name, each in own.items() if name in call.needs}
    if "q" in call.needs:
        found["q"] = _like(q)
        _queries_kernel[(triton.cdiv(queries, of_queries["ROWS"]), heads, batch)](
            q, k, v, grad, found["q"],
            *arguments(of_queries, triton.cdiv(keys, of_queries["KEYS"]), turned=False), **of_queries,
        )  # fmt: skip
    return found


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def launches_of(call: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the kernels of keys and of queries are launched with for a call."""
    chip, dims = chip_of(call.q.device), (call.q.shape[3], call.v.shape[3])
    of_keys, of_queries = (options_of(call) | _sizes(tiles, chip, *dims) for tiles in (_KEYS_TILES, _QUERIES_TILES))
    return of_keys, of_queries


def _sizes(tiles: Mapping[str, Any], chip: str, dim: int, value_dim: int) -> dict[str, Any]:
    """Return what a kernel is compiled for by shapes, and how."""
    sizes = padded(dim, value_dim)
    rows, keys, stages, warps = tiles[narrow_family_of(chip)][max(sizes["DIMS"], sizes["VALUES"]) > 64]
    if chip == INTERPRETER:
        rows, keys = (32, 64) if tiles is _KEYS_TILES else (64, 32)
    return sizes | {"ROWS": rows, "KEYS": keys, "STAGES": stages, "num_warps": warps, "enable_fp_fusion": True}


def _rows_options(value_dim: int) -> dict[str, Any]:
    values = padded(1, value_dim)["VALUES"]
    return {"VALUE_DIM": value_dim, "VALUES": values, "ROWS": _ROWS, "num_warps": 4, "enable_fp_fusion": True}


def _signature(dtype: str, results: str) -> dict[str, str]:
    """Return the types of a kernel's arguments: contiguous tensors whose rows are multiples of 16 numbers."""
    strides = [f"stride_{tensor}{place}" for tensor in "qkvgb" for place in ("b", "h", "m" if tensor in "qgb" else "n")]
    return {
        **pointers(f"q k v grad {results}", dtype), **pointers("total lost slopes bias", FP32),
        **pointers("lists counts intervals table", "i32"), **pointers("bits", "i64"),
        **integers(" ".join(strides)), **integers("stride_qd stride_kd stride_vd stride_gd stride_bn", ":1"),
        **integers("stride_lb stride_lh stride_ib stride_ih stride_tb stride_th stride_tm", ""),
        **integers("groups queries keys position tiles lines", ""), "scale": FP32, "cap": FP32, "factor": FP32,
    }  # fmt: skip


def _program(
    name: str, function: Any, results: str, tiles: Mapping[str, Any], dtype: str, dims: tuple[int, ...],
    masks: tuple[str, ...], spilled: Mapping[str, int],
) -> Program:  # fmt: skip
    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {
            f"{dim}, {mask}": {**PLAIN, **USUAL[mask], **_sizes(tiles, chip, dim, dim)}
            for dim in dims if dim <= _most_dim(chip) for mask in masks
        }  # fmt: skip

    contracts = spilling(products(dtype), spilled, _HOT if masks != ("everything",) else None)
    signature = {name: kind for name, kind in _signature(dtype, results).items() if name in function.arg_names}
    return Program(name, function, signature, contracts, launches)


def _rows_program(dtype: str) -> Program:
    signature = {
        **pointers("out grad", dtype), **pointers("grad_lse largest sums total lost", FP32),
        **integers("stride_gb stride_gh stride_gm"), **integers("stride_gd stride_lm", ":1"),
        **integers("stride_lb stride_lh queries", ""),
    }  # fmt: skip

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {str(dim): {"LSE": True, **_rows_options(dim)} for dim in (64, 128)}

    return Program(f"rows {dtype}", _rows_kernel, signature, NO_SPILLS, launches)


def _programs(
    name: str, function: Any, results: str, tiles: Mapping[str, Any], spilled: tuple[Mapping[str, int], ...]
) -> tuple[Program, ...]:
    """Return what is compiled ahead of a kernel; `spilled` are limits of usual calls, and of one with everything."""
    usual = tuple(mask for mask in USUAL if mask != "everything")
    return (
        _program(f"{name} {BF16}", function, results, tiles, BF16, (64, 128), usual, spilled[0]),
        _program(f"{name} {BF16}, everything", function, results, tiles, BF16, (64, 128), ("everything",), spilled[1]),
        _program(f"{name} {FP16}", function, results, tiles, FP16, (64,), ("documents",), spilled[0]),
    )


#: Bytes that the loop of full tiles of a usual call may spill on NVIDIA's chips.
_HOT = 24
#: Bytes of usual calls and of those with everything that may be spilled: nearly all are of tiles with a mask.
_SPILLED_OF_KEYS = (
    {"sm90": 576, "sm100": 448},
    {"sm80": 112, "sm86": 16, "sm89": 16, "sm90": 832, "sm100": 1504, "gfx90a": 32, "gfx942": 32, "gfx950": 160},
)
_SPILLED_OF_QUERIES = (
    {"sm80": 192, "sm86": 192, "sm89": 192, "sm90": 400, "sm100": 128, "gfx942": 32},
    {
        "sm80": 64, "sm86": 64, "sm89": 64, "sm90": 144, "sm100": 256, "gfx90a": 192, "gfx942": 208, "gfx950": 208,
        "gfx1100": 288,
    },
)  # fmt: skip
#: What is compiled ahead of time.
AOT = (
    _rows_program(BF16),
    *_programs("gradients of keys", _keys_kernel, "of_k of_v", _KEYS_TILES, _SPILLED_OF_KEYS),
    *_programs("gradients of queries", _queries_kernel, "of_q", _QUERIES_TILES, _SPILLED_OF_QUERIES),
)
