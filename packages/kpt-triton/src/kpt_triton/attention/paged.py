"""`attention.paged` for steps of decoding: each key and value is read once, where it lies in its page.

A program has a sequence, a head of the caches and a part of the sequence's keys; its rows are the queries of the heads
that share these. Where there is more than one part, a second launch merges them. How many there are follows from shapes
and the device, never from lengths: so nothing is read on the host, and a launch may be captured and replayed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.chips import NVIDIA, chip_of, no_codes
from kpt_triton.contracts import BF16, E4M3, FP16, FP32, integers, lean, pointers, products, spilling, tf32
from kpt_triton.launching import as_read, on_its_device, precision, programs
from kpt_triton.numeric import dot, narrow, widen

from .scores import LOWEST, numbers, single, step_of, tanh

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: The largest head_dim, which is padded to a power of two.
_MOST_DIM = 256
#: Rows of a program: products of matrices have 16 or more.
_LEAST_ROWS, _MOST_ROWS = 16, 32
_RDNA = ("gfx1100", "gfx1201")
#: Parts of a sequence's keys, and the least steps that one has where keys are as many as they may be.
_MOST_PARTS, _LEAST_STEPS = 128, 2
#: Programs for each one that fits onto the chip: lengths differ, and some are done early.
_SHARE = 2
#: Numbers of parts that are merged at a time.
_MERGED = 8192


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    if call.cu_seqlens_q is not None:
        return "several queries of a sequence; this kernel is for steps of decoding"
    if not (call.q.numel() and call.v_cache.numel() and call.block_table.numel()):
        return "there is nothing to compute"
    dim = max(call.q.shape[2], call.v_cache.shape[3])
    if dim > _MOST_DIM:
        return f"head_dim {dim}; this kernel holds up to {_MOST_DIM}"
    return no_codes(call.q.device, call.q.dtype, call.k_cache.dtype)


@triton.jit
def _finish(
    acc, total, top, place, head, inside, groups, out, lse, sinks, v_scale,
    SINKS: tl.constexpr, V_SCALED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Write rows whose weights, exponentials of scores less `top`, sum up to `total`."""
    if SINKS:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, sink)
        base = tl.maximum(higher, LOWEST)
        fading = tl.exp(top - base)
        acc *= fading[:, None]
        total = total * fading + tl.exp(sink - base)
        top = higher
    dead = total == 0
    total = tl.where(dead, 1.0, total)
    acc = acc / total[:, None]
    if V_SCALED:
        acc *= tl.load(v_scale + head // groups, mask=inside, other=0.0)[:, None]
    dims = tl.arange(0, VALUES)
    written = inside[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] * VALUE_DIM + dims[None, :], narrow(acc, out.dtype.element_ty), mask=written)
    found = tl.maximum(top, LOWEST) + tl.log(total)
    tl.store(lse + place, tl.where(dead, float("-inf"), found), mask=inside)


@triton.jit(
    do_not_specialize=[
        "capacity",
        "pages",
        "window",
        "first",
        "columns",
        "stride_tb",
        "stride_bh",
        "stride_bt",
        "stride_mt",
    ]
)
def _decode_kernel(
    q, k_cache, v_cache, table, lengths, out, lse, parts, tops, sums, sinks, k_scale, v_scale, slopes, bias, mask,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd, stride_vp, stride_vs, stride_vh,
    stride_vd, stride_tb, stride_as, stride_bh, stride_bt, stride_bk, stride_mt, stride_mk,
    kv_heads, groups, pages, capacity, window, first, columns, scale, cap,
    SINKS: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, SLOPES: tl.constexpr, BIAS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of a sequence's keys; WHOLE: there is but one, and its result is the op's.

    Products times `scale` are scores or, CAPPED, the arguments of a hyperbolic tangent, which is `cap` times as large.
    """
    blocks = tl.cdiv(groups, ROWS)
    work = tl.program_id(0)
    sequence = (work // (blocks * kv_heads)).to(tl.int64)
    kv_head = (work // blocks % kv_heads).to(tl.int64)
    row = work % blocks * ROWS + tl.arange(0, ROWS)
    inside = row < groups
    head = kv_head * groups + row
    place = sequence * kv_heads * groups + head
    length = tl.load(lengths + sequence)
    end = tl.minimum(length, capacity)
    # Steps begin at multiples of KEYS: those of the first keys, where a window leaves some out, then the window's.
    begin = 0
    leading = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
        leading = tl.minimum(tl.cdiv(first, KEYS), begin // KEYS)
    start = begin // KEYS
    steps = leading + tl.cdiv(tl.maximum(end - start * KEYS, 0), KEYS)
    part = tl.program_id(1)
    each = tl.cdiv(steps, tl.num_programs(1))
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    at = q + sequence * stride_qt + head[:, None] * stride_qh + dims[None, :] * stride_qd
    rows = tl.load(at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    if K_SCALED:
        scale = scale * tl.load(k_scale + kv_head)
    if SLOPES:
        slope = tl.load(slopes + sequence * stride_as + head, mask=inside, other=0.0).to(tl.float32)
    keys_of = k_cache + kv_head * stride_kh + dims[None, :] * stride_kd
    values_of = v_cache + kv_head * stride_vh + values[None, :] * stride_vd
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for step in tl.range(part * each, tl.minimum(part * each + each, steps), num_stages=STAGES):
        if WINDOW:
            key = tl.where(step < leading, step, step - leading + start) * KEYS + tl.arange(0, KEYS)
            seen = (key < end) & ((key >= begin) | (key < first))
        else:
            key = step * KEYS + tl.arange(0, KEYS)
            seen = key < end
        if MASKED:
            column = key + (columns - length)
            hidden = tl.load(
                mask + sequence * stride_mt + column.to(tl.int64) * stride_mk, mask=seen & (column >= 0), other=1
            )
            seen = seen & (hidden != 0)
        page = tl.load(table + sequence * stride_tb + key // PAGE, mask=seen, other=0)
        # As every kernel of the op does, so that a page that is not there is read nowhere.
        page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
        k = tl.load(
            keys_of + (page * stride_kp + slot * stride_ks)[:, None],
            mask=seen[:, None] & (dims < DIM)[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            values_of + (page * stride_vp + slot * stride_vs)[:, None],
            mask=seen[:, None] & (values < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        scores = dot(rows, widen(k, rows.dtype).T, tl.zeros((ROWS, KEYS), tl.float32), PRECISION) * scale
        if CAPPED:
            scores = tanh(scores) * cap
        if SLOPES:
            scores -= slope[:, None] * (length - 1 - key).to(tl.float32)[None, :]
        if BIAS:
            added = bias + sequence * stride_bt + head[:, None] * stride_bh + key.to(tl.int64)[None, :] * stride_bk
            scores += tl.load(added, mask=inside[:, None] & seen[None, :], other=0.0).to(tl.float32)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.maximum(higher, LOWEST)
        weights = tl.exp(scores - base[:, None])
        fading = tl.exp(top - base)
        total = total * fading + tl.sum(weights, 1)
        acc = dot(narrow(weights, rows.dtype), widen(v, rows.dtype), acc * fading[:, None], PRECISION)
        top = higher
    if WHOLE:
        _finish(
            acc, total, top, place, head, inside, groups, out, lse, sinks, v_scale, SINKS, V_SCALED, VALUE_DIM, VALUES
        )
    else:
        place = place * tl.num_programs(1) + part
        written = inside[:, None] & (values < VALUE_DIM)[None, :]
        tl.store(parts + place[:, None] * VALUE_DIM + values[None, :], acc, mask=written)
        tl.store(tops + place, top, mask=inside)
        tl.store(sums + place, total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _merge_kernel(
    parts, tops, sums, out, lse, sinks, v_scale, heads, groups, count,
    SINKS: tl.constexpr, V_SCALED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """The `count` parts of one query and head, MERGED at a time; PARTS: their number, padded."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + place * count + part, mask=part < count, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.maximum(highest, LOWEST)
    total = tl.sum(tl.load(sums + place * count + part, mask=part < count, other=0.0) * tl.exp(top - base), 0)
    values = tl.arange(0, VALUES)
    acc = tl.zeros((VALUES,), tl.float32)
    for start in range(0, PARTS, MERGED):
        some = start + tl.arange(0, MERGED)
        weight = tl.exp(tl.load(tops + place * count + some, mask=some < count, other=float("-inf")) - base)
        read = (some < count)[:, None] & (values < VALUE_DIM)[None, :]
        found = tl.load(parts + (place * count + some)[:, None] * VALUE_DIM + values[None, :], mask=read, other=0.0)
        acc += tl.sum(found * weight[:, None], 0)
    one = tl.arange(0, 1)
    _finish(
        acc[None, :], total + tl.zeros((1,), tl.float32), highest + tl.zeros((1,), tl.float32), place + one,
        (place % heads) + one, one == 0, groups, out, lse, sinks, v_scale, SINKS, V_SCALED, VALUE_DIM, VALUES,
    )  # fmt: skip


@on_its_device
def forward(call: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, where it is asked for, the log-sum-exp."""
    keys = call.block_table.shape[1] * call.k_cache.shape[1]
    launch = _launch_of(call)
    # A window's first and last steps may have few keys of it.
    seen = min(keys, call.window + call.first + 2 * launch["KEYS"]) if call.window else keys
    work = (
        call.q.shape[0] * call.k_cache.shape[2] * triton.cdiv(call.q.shape[1] // call.k_cache.shape[2], launch["ROWS"])
    )
    most = min(_MOST_PARTS, triton.cdiv(seen, _LEAST_STEPS * launch["KEYS"]))
    wanted = _SHARE * programs(call.q.device, work * most, launch["num_warps"])
    return attend(call, max(1, min(most, triton.cdiv(wanted, work))), launch)


def attend(call: Any, count: int, launch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return what `forward` does.

    Args:
        call: of the op.
        count: parts of each sequence's keys.
        launch: what the first kernel is launched with, from `_launch_of`.
    """
    q, k_cache, v_cache = call.q.detach(), as_read(call.k_cache.detach()), as_read(call.v_cache.detach())
    (tokens, heads, dim), (pages, size, kv_heads, value_dim) = q.shape, v_cache.shape
    table = call.block_table if call.block_table.stride(1) == 1 else call.block_table.contiguous()
    out, lse = q.new_empty(tokens, heads, value_dim), q.new_empty(tokens, heads, dtype=torch.float32)
    if count == 1:
        parts = tops = sums = lse  # not written
    else:
        parts = lse.new_empty(tokens, heads, count, value_dim)
        tops, sums = lse.new_empty(2, tokens, heads, count)
    sinks, k_scale, v_scale = (numbers(each) for each in (call.sinks, call.k_scale, call.v_scale))
    slopes, bias = numbers(call.alibi_slopes), None if call.bias is None else single(call.bias)
    mask = call.mask.view(torch.uint8) if launch["MASKED"] else None
    scale = dim**-0.5 if call.scale is None else call.scale
    scale = scale / call.softcap if call.softcap else scale

    def there(tensor: Tensor | None) -> Tensor:
        return lse if tensor is None else tensor

    groups = heads // kv_heads
    ends = {name: launch[name] for name in ("V_SCALED", "SINKS", "VALUE_DIM", "VALUES")}
    _decode_kernel[(tokens * kv_heads * triton.cdiv(groups, launch["ROWS"]), count)](
        q, k_cache, v_cache, table, call.lengths.contiguous(), out, lse, parts, tops, sums, there(sinks),
        there(k_scale), there(v_scale), there(slopes), there(bias), there(mask),
        *q.stride(), *k_cache.stride(), *v_cache.stride(), table.stride(0),
        0 if slopes is None or slopes.dim() == 1 else heads,
        *((0, 0, 0) if bias is None else bias.expand(heads, tokens, -1).stride()),
        *((0, 0) if mask is None else mask.stride()),
        kv_heads, groups, pages, table.shape[1] * size, call.window, call.first,
        0 if mask is None else mask.shape[1], scale, call.softcap, WHOLE=count == 1, **launch,
    )  # fmt: skip
    if count > 1:
        _merge_kernel[(tokens * heads,)](
            parts, tops, sums, out, lse, there(sinks), there(v_scale), heads, groups, count,
            **ends, **_merge_launch(count, launch["VALUES"]),
        )  # fmt: skip
    return out, lse if call.return_lse else None


def _launch_of(call: Any) -> dict[str, Any]:
    """Return what the first kernel is launched with for a call, but WHOLE."""
    options = {
        "SINKS": call.sinks is not None, "K_SCALED": call.k_scale is not None, "V_SCALED": call.v_scale is not None,
        "SLOPES": call.alibi_slopes is not None, "BIAS": call.bias is not None,
        "MASKED": call.mask is not None and call.mask.shape[1] > 0, "CAPPED": call.softcap > 0,
        "WINDOW": call.window > 0, "PRECISION": precision(call.q),
    }  # fmt: skip
    (_, heads, dim), (_, size, kv_heads, value_dim) = call.q.shape, call.v_cache.shape
    sizes = _sizes(chip_of(call.q.device), call.q.element_size(), size, heads // kv_heads, dim, value_dim)
    return options | sizes


def _sizes(chip: str, itemsize: int, page: int, groups: int, dim: int, value_dim: int) -> dict[str, Any]:
    """Return what the first kernel is compiled for by shapes, and how; `itemsize` is the queries'."""
    dims, values = (max(16, triton.next_power_of_2(each)) for each in (dim, value_dim))
    keys, stages, warps = step_of(chip, itemsize, max(dims, values))
    return {
        "PAGE": page, "DIM": dim, "DIMS": dims, "VALUE_DIM": value_dim, "VALUES": values,
        # More rows of float32 are more than registers hold.
        "ROWS": _LEAST_ROWS if itemsize == 4 or groups <= _LEAST_ROWS else _MOST_ROWS,
        "KEYS": keys, "STAGES": stages, "num_warps": warps, "enable_fp_fusion": True,
    }  # fmt: skip


def _merge_launch(count: int, values: int) -> dict[str, Any]:
    padded = triton.next_power_of_2(count)
    return {"PARTS": padded, "MERGED": min(padded, _MERGED // values), "num_warps": 4, "enable_fp_fusion": True}


def _signature(dtype: str, cache: str) -> dict[str, str]:
    """Return the types of the first kernel's arguments: contiguous tensors whose rows are multiples of 16 numbers."""
    return {
        **pointers("q out", dtype), **pointers("k_cache v_cache", cache), **pointers("table lengths", "i32"),
        **pointers("lse parts tops sums sinks k_scale v_scale slopes bias", FP32), **pointers("mask", "u8"),
        **integers("stride_qt stride_qh stride_kp stride_ks stride_kh stride_vp stride_vs stride_vh"),
        **integers("stride_qd stride_kd stride_vd stride_bk stride_mk", ":1"),
        **integers("stride_tb stride_as stride_bh stride_bt stride_mt", ""),
        **integers("kv_heads groups pages capacity window first columns", ""), "scale": FP32, "cap": FP32,
    }  # fmt: skip


#: What calls may have beside queries and caches.
_PLAIN = dict.fromkeys(
    ("SINKS", "K_SCALED", "V_SCALED", "SLOPES", "BIAS", "MASKED", "CAPPED", "WINDOW", "WHOLE"), False
)


def _launches(itemsize: int, precision: str, **options: bool) -> Callable[[str], Mapping[str, Mapping[str, Any]]]:
    """Return launches for heads of usual sizes, and one with everything that a call may have."""

    def found(chip: str) -> dict[str, Mapping[str, Any]]:
        def of(page: int, groups: int, dim: int, value_dim: int, **more: bool) -> dict[str, Any]:
            sizes = _sizes(chip, itemsize, page, groups, dim, value_dim)
            return {**_PLAIN, "PRECISION": precision, **options, **more, **sizes}

        everything = {**dict.fromkeys(_PLAIN, True), **options}
        return {
            "128": of(16, 4, 128, 128),
            "128, whole": of(16, 4, 128, 128, WHOLE=True),
            "64, a window, sinks": of(16, 8, 64, 64, WINDOW=True, SINKS=True, WHOLE=True),
            "256, a window, softcap": of(64, 2, 256, 256, WINDOW=True, CAPPED=True),
            "80, 32 rows": of(16, 32, 80, 80),
            "128, everything": of(16, 4, 128, 128, **everything),
        }

    return found


def _merge_program(dtype: str) -> Program:
    signature = {
        **pointers("parts tops sums lse sinks v_scale", FP32), **pointers("out", dtype),
        **integers("heads groups count", ""),
    }  # fmt: skip

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {
            f"{count} of {dim}": {
                "SINKS": True, "V_SCALED": True, "VALUE_DIM": dim, "VALUES": dim, **_merge_launch(count, dim)
            }
            for count in (2, _MOST_PARTS) for dim in (64, 256)
        }  # fmt: skip

    return Program(f"merge {dtype}", _merge_kernel, signature, NO_SPILLS, launches)


def _program(dtype: str, cache: str, itemsize: int, contracts: Mapping[str, str], precision: str = "ieee") -> Program:
    name = f"decode {dtype}" if cache == dtype else f"decode {dtype}, {cache}"
    name += "" if precision == "ieee" else f", {precision}"
    scaled = {} if cache == dtype else {"K_SCALED": True, "V_SCALED": True}
    return Program(name, _decode_kernel, _signature(dtype, cache), contracts, _launches(itemsize, precision, **scaled))


def _few_spills(contracts: Mapping[str, str], *, wide: int = 16) -> dict[str, str]:
    """Let registers spill that ptxas gives up for occupancy; on RDNA `wide` bytes, which heads of 256 cost there."""
    return {
        chip: clauses.replace("no spills", f"spills <= {wide if chip in _RDNA else 16} B")
        if chip in (*NVIDIA, *_RDNA) else clauses
        for chip, clauses in contracts.items()
    }  # fmt: skip


#: What is compiled ahead of time.
AOT = (
    _program(BF16, BF16, 2, _few_spills(products(BF16, tall=False), wide=256)),
    _program(FP16, FP16, 2, _few_spills(products(FP16, tall=False), wide=256)),
    _program(FP32, FP32, 4, _few_spills(lean(), wide=512)),
    _program(FP32, FP32, 4, _few_spills(tf32(tall=False)), "tf32"),
    # On RDNA3 integers widen the codes, which costs registers.
    _program(BF16, E4M3, 2, _few_spills(spilling(products(BF16, tall=False), {"gfx1100": 720}))),
    _merge_program(BF16),
    _merge_program(FP32),
)
