"""`fp8.quantize` in one pass over the numbers, and for one scale of all in two: every bit as the op specifies.

Numbers are rounded to codes by integers, as float32 is rounded to fewer bits anywhere: so chips without 8-bit numbers
have this kernel too, it is right in the interpreter, and no conversion of a chip has a say in it.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.launching import inner_contiguous, on_its_device

#: Mantissa bits, bias, largest number, and whether minus zero is the one NaN.
_FORMATS = {
    torch.float8_e4m3fn: (3, 7, 448.0, False),
    torch.float8_e5m2: (2, 15, 57344.0, False),
    torch.float8_e4m3fnuz: (3, 8, 240.0, True),
    torch.float8_e5m2fnuz: (2, 16, 57344.0, True),
}
#: Numbers of a row that share a scale; None for all of them.
_WIDTHS = {"row": None, "1x128": 128, "1x32": 32}
_SIDE = 128
#: Numbers that a program holds at a time, and the most of one row.
_HELD, _MOST = 4096, 8192
#: Programs that look for the largest number of all.
_LOOKERS = 512
#: What launches are compiled with: each product and sum is rounded by itself.
_FOUR, _EIGHT = ({"num_warps": warps, "enable_fp_fusion": False} for warps in (4, 8))
_LOOKING: dict[str, Any] = {"WIDTH": _HELD, **_FOUR}
_WHOLE: dict[str, Any] = {"WIDTH": _HELD, "LOOKERS": _LOOKERS, **_FOUR}
_SQUARES: dict[str, Any] = {"SIDE": _SIDE, **_EIGHT}


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    if call.stochastic:
        return "stochastic rounding, which this kernel does not draw for"
    if not call.x.numel():
        return "there is nothing to quantise"
    if call.scale is None and call.scale_dtype is torch.float64:
        return "a scale in float64; this kernel computes it in float32 or as a power of two"
    return None


@triton.jit
def codes_of(
    x, scale,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, MAGIC: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """The codes of `x / scale`, both of one shape, as uint8. MOST: the largest number's bits; MAGIC: see below."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = tl.div_rn(x, scale).to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # A float's order is that of its bits; NaN is above infinity.
    kept = tl.minimum(size, MOST)
    normal = ((kept + ((1 << (SHIFT - 1)) - 1) + ((kept >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Below its least normal number a format has equal steps: they are those of float32 about MAGIC.
    least = tl.full(kept.shape, MAGIC, tl.uint32)
    moved = kept.to(tl.float32, bitcast=True) + least.to(tl.float32, bitcast=True)
    code = tl.where(kept < ((128 - BIAS) << 23), moved.to(tl.uint32, bitcast=True) - least, normal)
    if FNUZ:
        code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
        code = tl.where(size > 0x7F800000, 0x80, code)
    else:
        code = tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def _sizes(x):
    """The magnitudes of what is finite, and zeros."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _scale_of(largest, most, LOG: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the scale of numbers whose largest is this; `most`, of the same shape, is the format's: 2^LOG or more."""
    if ROUNDING == "down":
        exponent = ((largest.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - LOG) - 127
        scale = ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(largest, most), 1.1754943508222875e-38)
        if ROUNDING == "up":
            bits = scale.to(tl.uint32, bitcast=True) + 0x7FFFFF
            scale = (bits & 0xFF800000).to(tl.float32, bitcast=True)
    return tl.where(largest == 0, 1.0, scale)


@triton.jit
def _stored(scale, POWERS: tl.constexpr):
    """A scale as it is stored: its exponent alone, or all of it."""
    if POWERS:
        return (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)
    else:
        return scale


@triton.jit(do_not_specialize=["groups", "total"])
def _rows_kernel(
    x, scale, codes, stride, columns, width, groups, total,
    GIVEN: tl.constexpr, POWERS: tl.constexpr, ROUNDING: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, SATURATE: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, MAGIC: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """GROUPS runs of `width` numbers of a row, a scale each.

    WHOLE: a run fits into WIDTH. SATURATE: an infinity becomes the largest number, else NaN.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row, first = group // groups, group % groups * width
    end = tl.minimum(first + width, columns)[:, None]
    known = (group < total)[:, None]
    if GIVEN:
        own = tl.load(scale + group, mask=group < total, other=1.0)
    else:
        largest = tl.zeros((GROUPS,), tl.float32)
        if not WHOLE:
            for start in range(0, width, WIDTH):
                column = first[:, None] + (start + tl.arange(0, WIDTH))[None, :]
                values = tl.load(x + row[:, None] * stride + column, mask=known & (column < end), other=0.0)
                largest = tl.maximum(largest, tl.max(_sizes(values.to(tl.float32)), 1))
    for start in range(0, 1 if WHOLE else width, WIDTH):
        column = first[:, None] + (start + tl.arange(0, WIDTH))[None, :]
        inside = known & (column < end)
        values = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
        if not GIVEN:
            if WHOLE:
                largest = tl.max(_sizes(values), 1)
            own = _scale_of(largest, tl.full((GROUPS,), LARGEST, tl.float32), LOG, ROUNDING)
        spread = tl.broadcast_to(own[:, None], values.shape)
        if not SATURATE:
            values = tl.where(tl.abs(values) < float("inf"), values, float("nan"))
        code = codes_of(values, spread, MANTISSA, BIAS, MOST, MAGIC, FNUZ)
        tl.store(codes + row[:, None] * columns + column, code, mask=inside)
    if not GIVEN:
        own = _scale_of(largest, tl.full((GROUPS,), LARGEST, tl.float32), LOG, ROUNDING)
        tl.store(scale + group, _stored(own, POWERS), mask=group < total)


@triton.jit(do_not_specialize=["rows", "down", "across"])
def _squares_kernel(
    x, scale, codes, stride, columns, rows, down, across,
    GIVEN: tl.constexpr, POWERS: tl.constexpr, ROUNDING: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
    SIDE: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, MAGIC: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """One block of SIDE by SIDE; `rows` are those of each matrix of a stack, `down` and `across` its blocks."""
    block = tl.program_id(0).to(tl.int64)
    matrix, place = block // (down * across), block % (down * across)
    row = place // across * SIDE + tl.arange(0, SIDE)
    column = (place % across * SIDE + tl.arange(0, SIDE))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    row = (matrix * rows + row)[:, None]
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        own = tl.load(scale + block)
    else:
        largest = tl.max(_sizes(values), 1)
        largest = tl.max(largest, 0)
        own = _scale_of(largest, tl.full((), LARGEST, tl.float32), LOG, ROUNDING)
        tl.store(scale + block, _stored(own, POWERS))
    code = codes_of(values, tl.broadcast_to(own, values.shape), MANTISSA, BIAS, MOST, MAGIC, FNUZ)
    tl.store(codes + row * columns + column, code, mask=inside)


@triton.jit(do_not_specialize=["share"])
def _largest_kernel(x, largest, count, share, WIDTH: tl.constexpr):
    """The largest finite magnitude of each program's `share` of the numbers."""
    first = tl.program_id(0).to(tl.int64) * share
    end = tl.minimum(first + share, count)
    found = tl.zeros((WIDTH,), tl.float32)
    for start in range(first, end, WIDTH):
        place = start + tl.arange(0, WIDTH)
        found = tl.maximum(found, _sizes(tl.load(x + place, mask=place < end, other=0.0).to(tl.float32)))
    tl.store(largest + tl.program_id(0), tl.max(found, 0))


@triton.jit(do_not_specialize=["lookers"])
def _whole_kernel(
    x, scale, codes, largest, count, lookers,
    GIVEN: tl.constexpr, POWERS: tl.constexpr, ROUNDING: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
    WIDTH: tl.constexpr, LOOKERS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, MAGIC: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """WIDTH numbers, of a scale for all, which each program makes of what was found by those of `_largest_kernel`."""
    if GIVEN:
        own = tl.load(scale)
    else:
        looker = tl.arange(0, LOOKERS)
        most = tl.max(tl.load(largest + looker, mask=looker < lookers, other=0.0), 0)
        own = _scale_of(most, tl.full((), LARGEST, tl.float32), LOG, ROUNDING)
        if tl.program_id(0) == 0:
            tl.store(scale, _stored(own, POWERS))
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    code = codes_of(values, tl.broadcast_to(own, values.shape), MANTISSA, BIAS, MOST, MAGIC, FNUZ)
    tl.store(codes + place, code, mask=place < count)


@on_its_device
def forward(call: Any) -> tuple[Tensor, Tensor]:
    """Return the codes and their scale."""
    x, by = call.x.detach(), call.granularity
    codes = torch.empty(x.shape, dtype=call.dtype, device=x.device)
    settings = _settings(call.dtype, call.scale_rounding, call.scale is not None, call.scale_dtype)
    if call.scale is None:
        found = torch.empty(_shape(x.shape, by), dtype=call.scale_dtype, device=x.device)
        scale = found.view(torch.uint8) if settings["POWERS"] else found
    else:
        found = call.scale.detach().clone(memory_format=torch.contiguous_format)
        scale = found.to(torch.float32)
    written = codes.view(torch.uint8)
    if by == "tensor":
        x, count = x.contiguous(), x.numel()
        share = triton.cdiv(triton.cdiv(count, _LOOKERS), _HELD) * _HELD
        lookers = triton.cdiv(count, share)
        largest = scale
        if call.scale is None:
            largest = torch.empty(lookers, dtype=torch.float32, device=x.device)
            _largest_kernel[(lookers,)](x, largest, count, share, **_LOOKING)
        _whole_kernel[(triton.cdiv(count, _HELD),)](x, scale, written, largest, count, lookers, **_WHOLE, **settings)
        return codes, found
    columns = x.shape[-1]
    flat = inner_contiguous(x.reshape(-1, columns))
    if by == "128x128":
        rows = x.shape[-2]
        down, across = triton.cdiv(rows, _SIDE), triton.cdiv(columns, _SIDE)
        blocks = flat.shape[0] // rows * down * across
        _squares_kernel[(blocks,)](
            flat, scale, written, flat.stride(0), columns, rows, down, across, **_SQUARES, **settings
        )
        return codes, found
    width = _WIDTHS[by] or columns
    groups = triton.cdiv(columns, width)
    total = flat.shape[0] * groups
    launch = _rows_launch(width)
    _rows_kernel[(triton.cdiv(total, launch["GROUPS"]),)](
        flat, scale, written, flat.stride(0), columns, width, groups, total, **launch, **settings
    )
    return codes, found


def quantize_rows(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Quantise rows for a product that is to show where a number of theirs overflowed: an infinity becomes NaN.

    Args:
        x: `[rows, K]`.
        granularity: `row` or `1x128`.

    Returns:
        Codes `[rows, K]` of float8_e4m3fn, and float32 scales `[rows, 1]` or `[rows, ceil(K / 128)]`.
    """
    x = inner_contiguous(x)
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    width = _WIDTHS[granularity] or columns
    groups = triton.cdiv(columns, width)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if x.numel():
        launch = _rows_launch(width) | {"SATURATE": False}
        _rows_kernel[(triton.cdiv(rows * groups, launch["GROUPS"]),)](
            x, scale, codes.view(torch.uint8), x.stride(0), columns, width, groups, rows * groups, **launch,
            **_settings(codes.dtype, "none", False, torch.float32),
        )  # fmt: skip
    return codes, scale


def _shape(shape: torch.Size, by: str) -> list[int]:
    """Return the shape of the scales."""
    *others, last = shape
    if by == "tensor":
        return []
    if by == "row":
        return others
    if by == "128x128":
        others[-1] = triton.cdiv(others[-1], _SIDE)
        return [*others, triton.cdiv(last, _SIDE)]
    return [*others, triton.cdiv(last, _WIDTHS[by])]


def format_of(dtype: torch.dtype) -> dict[str, Any]:
    """Return what `codes_of` is compiled for, for codes of a dtype."""
    mantissa, bias, most, fnuz = _FORMATS[dtype]
    (bits,) = struct.unpack("<I", struct.pack("<f", most))
    return {
        "MANTISSA": mantissa, "BIAS": bias, "MOST": bits, "MAGIC": (127 + 24 - bias - mantissa) << 23, "FNUZ": fnuz,
    }  # fmt: skip


def _settings(dtype: torch.dtype, rounding: str, given: bool, scale_dtype: torch.dtype) -> dict[str, Any]:
    """Return what all kernels are compiled for but `_largest_kernel`."""
    most = _FORMATS[dtype][2]
    return {
        "GIVEN": given, "POWERS": not given and scale_dtype is torch.float8_e8m0fnu,
        "ROUNDING": "none" if given else rounding, "LOG": math.frexp(most)[1] - 1, "LARGEST": most,
        **format_of(dtype),
    }  # fmt: skip


def _rows_launch(width: int) -> dict[str, Any]:
    held = min(triton.next_power_of_2(width), _MOST)
    warps = _EIGHT if held > _HELD else _FOUR
    return {"WIDTH": held, "GROUPS": max(1, _HELD // held), "WHOLE": width <= _MOST, "SATURATE": True, **warps}


_NUMBERS = {"stride": "i32:16", "columns": "i32:16"}


def _launches(launch: Mapping[str, Any], *kinds: tuple[torch.dtype, str]) -> dict[str, Mapping[str, Any]]:
    """Return a launch for formats, and how scales are rounded, up to exponents alone."""
    return {
        f"{str(dtype).removeprefix('torch.')} {rounding}": {
            **_settings(dtype, rounding, False, torch.float8_e8m0fnu if rounding == "up" else torch.float32), **launch
        }
        for dtype, rounding in kinds
    }  # fmt: skip


def _row_launches() -> dict[str, Mapping[str, Any]]:
    """Return launches for each format and rounding, and for rows that fit at once and do not."""
    plain = torch.float8_e4m3fn, "none"
    kinds = [(dtype, "none") for dtype in _FORMATS] + [(torch.float8_e4m3fn, rounding) for rounding in ("up", "down")]
    wide = {f"of {width}": next(iter(_launches(_rows_launch(width), plain).values())) for width in (4096, 14336)}
    return _launches(_rows_launch(128), *kinds) | wide


def _programs(dtype: str) -> tuple[Program, ...]:
    pointers = {"x": f"*{dtype}:16", "scale": "*fp32:16", "codes": "*u8:16"}
    rows = {**pointers, **_NUMBERS, "width": "i32:16", "groups": "i32", "total": "i32"}
    squares = {**pointers, **_NUMBERS, "rows": "i32", "down": "i32", "across": "i32"}
    largest = {"x": f"*{dtype}:16", "largest": "*fp32:16", "count": "i32:16", "share": "i32"}
    whole = {**pointers, "largest": "*fp32:16", "count": "i32:16", "lookers": "i32"}
    both = (torch.float8_e4m3fn, "up"), (torch.float8_e4m3fnuz, "none")
    return (
        Program(f"rows {dtype}", _rows_kernel, rows, NO_SPILLS, lambda chip: _row_launches()),
        Program(f"squares {dtype}", _squares_kernel, squares, NO_SPILLS, lambda chip: _launches(_SQUARES, *both)),
        Program(f"largest {dtype}", _largest_kernel, largest, NO_SPILLS, lambda chip: {"default": _LOOKING}),
        Program(f"whole {dtype}", _whole_kernel, whole, NO_SPILLS, lambda chip: _launches(_WHOLE, *both)),
    )


#: What is compiled ahead of time; numbers of float16 are loaded as those of bfloat16.
AOT = (*_programs("bf16"), *_programs("fp32"))
