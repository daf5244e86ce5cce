"""`fp8.scaled_mm` by the chip's 8-bit matrix units, for what the vendor's library leaves: scales of blocks above all.

The codes themselves are multiplied. NVIDIA's units add with fewer bits than float32 has, so their sums of BLOCK_K
numbers are added up in float32, which is also where scales of blocks are multiplied in. Codes that a chip does not
multiply are widened to float16 in registers, which holds each of them exactly; so are those whose sums have to be exact
to more bits than such units have.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kpt_triton.aot import Program
from kpt_triton.chips import AMD, INTEL, INTERPRETER, MEMORY, NVIDIA, SHORT_SUMS, chip_of, family_of, multiplied
from kpt_triton.contracts import BF16, FP32, Tiles, blocks, integers, launches, pointers, spilling
from kpt_triton.launching import inner_contiguous, on_its_device, programs
from kpt_triton.numeric import INTERPRETED, half_of, narrow, widen
from kpt_triton.tile import Tile, narrowed

#: By granularity, how many rows share a scale, and how many numbers of them; 0 where it is all of a row or tensor.
_SHARED = {"tensor": (1, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
#: Bytes in which operands are read.
_ALIGNMENT = 16
#: Rows up to which codes that the chip does not multiply are widened here, where scales multiply sums alone.
_MOST_ROWS = 1024
#: More tiles than any chip has places for.
_MANY = 1 << 30
#: By family: the tiles for more than 64 rows, for 33 to 64, and for fewer; 16 rows have half of the last one's.
_TILES = {
    **dict.fromkeys(("sm80", "sm86", "sm120"), ("128x128x128 w8 s3 g8", "64x128x128 w4 s3 g8", "32x64x128 w4 s4 g1")),
    # Units of 8 bits have 64 rows and more there; those of fewer are of 16 bits.
    "sm90": ("128x128x128 w8 s3 g8", "64x128x128 w4 s3 g8", "64x32x128 w4 s4 g1"),
    "sm100": ("128x64x128 w8 s4 g8", "64x128x128 w4 s3 g8", "64x32x128 w4 s4 g1"),
    "gfx9": ("128x128x128 w8 s2 g8", "64x128x128 w8 s2 g8", "32x64x128 w4 s2 g1"),
    "gfx11": ("64x64x64 w4 s2 g8", "64x64x64 w4 s2 g8", "32x64x64 w4 s2 g1"),
    "xe": ("64x128x64 w16 s2 g8", "64x128x64 w16 s2 g8", "32x64x64 w4 s2 g1"),
}
#: An operation of the interpreter takes as long for a large tile as for a small.
_INTERPRETED = Tile(64, 128, 128)


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    a, b = call.a, call.b
    if call.out_dtype is torch.float64:
        return "a result in float64; this kernel sums in float32"
    if call.scale_a.dtype is torch.float64 or call.scale_b.dtype is torch.float64:
        return "scales in float64; this kernel sums in float32"
    if not (a.numel() and b.numel()):
        return "there is nothing to compute"
    chip = chip_of(a.device)
    outside = not (_SHARED[call.granularity_a][1] or _SHARED[call.granularity_b][1])
    if outside and a.shape[0] > _MOST_ROWS and not multiplies_codes(chip, a.dtype, b.dtype, call.out_dtype):
        return f"more than {_MOST_ROWS} rows of codes to widen on {chip}; the library's product of such is faster"
    if chip == "gfx90a" and not {a.dtype, b.dtype} <= {torch.float8_e4m3fn, torch.float8_e4m3fnuz}:
        return "e5m2 on gfx90a, whose products take the small numbers of float16 for zeros"
    return None


def multiplies_codes(chip: str, a: torch.dtype, b: torch.dtype, out: torch.dtype) -> bool:
    """Return whether the codes themselves are multiplied: where units add with few bits, for bfloat16 alone."""
    return {a, b} <= set(multiplied(chip)) and (out is torch.bfloat16 or chip not in SHORT_SUMS)


@triton.jit
def _product(x, w, acc, FORMAT_X: tl.constexpr, FORMAT_W: tl.constexpr, PROMOTE: tl.constexpr):
    """`acc + x @ w`; PROMOTE names units that add with few bits, which must not add to `acc`."""
    if FORMAT_X != "":
        return tl.dot(half_of(x, FORMAT_X), half_of(w, FORMAT_W), acc)
    elif INTERPRETED:
        return tl.dot(widen(x, tl.float32), widen(w, tl.float32), acc, input_precision="ieee")
    elif PROMOTE == "wgmma":
        return tl.dot(x, w, acc, max_num_imprecise_acc=x.shape[1])
    elif PROMOTE == "mma":
        # The limit means nothing to these units, but keeps the compiler from adding to `acc` in them.
        return acc + tl.dot(x, w, max_num_imprecise_acc=x.shape[1])
    else:
        return tl.dot(x, w, acc)


@triton.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk"])
def scaled_mm_kernel(
    a, b, out, scale_a, scale_b, bias, M, N, K, stride_am, stride_bn, stride_sam, stride_sak, stride_sbn, stride_sbk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HIGH_A: tl.constexpr, WIDE_A: tl.constexpr, HIGH_B: tl.constexpr, WIDE_B: tl.constexpr,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr, FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """One tile of `a [M, K] @ b [N, K].T`.

    What the names do not say:
        HIGH_A, WIDE_A: rows and numbers of a that share a scale; WIDE_A is 0 where all of a row does. b likewise.
        FORMAT_A, FORMAT_B: of codes that are given as uint8 and widened; empty for numbers that the chip multiplies.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)
    # What is past the end is computed of the first row, and not stored.
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.where(row < M, row, 0).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.where(column < N, column, 0).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    at_a = a + row[:, None] * stride_am + inner[None, :]
    at_b = b + column[None, :] * stride_bn + inner[:, None]
    scales_a = scale_a + row // HIGH_A * stride_sam
    scales_b = scale_b + column // HIGH_B * stride_sbn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(at_a + k)
            w = tl.load(at_b + k)
        else:
            x = tl.load(at_a + k, mask=(k + inner < K)[None, :], other=0.0)
            w = tl.load(at_b + k, mask=(k + inner < K)[:, None], other=0.0)
        if WIDE_A or WIDE_B:
            part = _product(x, w, tl.zeros_like(acc), FORMAT_A, FORMAT_B, "")
            # One after the other: the product of two scales may leave the range of float32 where the sum does not.
            if WIDE_A:
                part *= tl.load(scales_a + k // WIDE_A * stride_sak)[:, None]
            if WIDE_B:
                part *= tl.load(scales_b + k // WIDE_B * stride_sbk)[None, :]
            acc += part
        else:
            acc = _product(x, w, acc, FORMAT_A, FORMAT_B, PROMOTE)
    if not WIDE_A:
        acc *= tl.load(scales_a)[:, None]
    if not WIDE_B:
        acc *= tl.load(scales_b)[None, :]
    if BIAS:
        acc += tl.load(bias + column).to(tl.float32)[None, :]
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    places = (out + row.to(tl.int64) * N)[:, None] + column[None, :]
    tl.store(places, narrow(acc, out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@on_its_device
def forward(call: Any) -> Tensor:
    """Op `fp8.scaled_mm`: products of codes, scales and bias in float32, rounded once.

    Args:
        call: the call of the op; its configuration may name a `tile`, see `kpt_triton.tile.Tile`.

    Returns:
        `[M, N]` of the dtype that is asked for.
    """
    a, b, chip = _aligned(call.a), _aligned(call.b.t()), chip_of(call.a.device)
    (rows, inner), columns = a.shape, b.shape[0]
    scale_a, scale_b = call.scale_a.float(), call.scale_b.float()
    settings = _settings(chip, a.dtype, b.dtype, call.out_dtype, call.granularity_a, call.granularity_b)
    if settings["FORMAT_A"]:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if call.config is not None and (written := call.config.get("tile")):
        tile = Tile.parse(written)
    else:
        tile = default_tile(chip, rows, bool(settings["FORMAT_A"]))
        tile = narrowed(tile, columns, programs(a.device, _MANY, warps=16))
    out = torch.empty(rows, columns, dtype=call.out_dtype, device=a.device)
    bias = None if call.bias is None else call.bias.contiguous()
    constants = _constants(tile, settings)
    scaled_mm_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)](
        a, b, out, scale_a, scale_b, out if bias is None else bias, rows, columns, inner, a.stride(0), b.stride(0),
        *_strides(scale_a), *_strides(scale_b.t() if scale_b.dim() == 2 else scale_b),
        BIAS=bias is not None, EVEN_K=inner % constants["BLOCK_K"] == 0, **constants, **settings, **tile.options(),
    )  # fmt: skip
    return out


def default_tile(chip: str, rows: int, widened: bool = False) -> Tile:
    """Return the tile for a chip where nothing was measured; `widened`: codes become float16."""
    if chip == INTERPRETER:
        return _INTERPRETED
    tall, middle, low = map(Tile.parse, _TILES[family_of(chip)])
    tile = tall if rows > 64 else middle if rows > 32 else low
    if rows <= 16 and tile.m == 32:
        tile = replace(tile, m=16)
    return replace(tile, k=tile.k // 2) if widened else tile


def _aligned(x: Tensor) -> Tensor:
    """Return rows that are read in whole vectors: a copy with zeros behind each row where x has none such."""
    x = inner_contiguous(x)
    over = -x.shape[1] % _ALIGNMENT
    if over or x.stride(0) % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        return F.pad(x.view(torch.uint8), (0, over)).view(x.dtype)
    return x


def _strides(scale: Tensor) -> tuple[int, int]:
    """Return how far the scales of the next row, and those of the next numbers of a row, are away."""
    found = (*scale.stride(), 0, 0)
    return found[0], found[1]


def _settings(chip: str, a: torch.dtype, b: torch.dtype, out: torch.dtype, by_a: str, by_b: str) -> dict[str, Any]:
    """Return what the kernel is compiled for, but for sizes and bias."""
    native = multiplies_codes(chip, a, b, out)
    (high_a, wide_a), (high_b, wide_b) = _SHARED[by_a], _SHARED[by_b]
    return {
        "HIGH_A": high_a, "WIDE_A": wide_a, "HIGH_B": high_b, "WIDE_B": wide_b,
        "FORMAT_A": "" if native else _short(a), "FORMAT_B": "" if native else _short(b),
        "PROMOTE": ("wgmma" if chip == "sm90" else "mma") if native and chip in SHORT_SUMS else "",
    }  # fmt: skip


def _constants(tile: Tile, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the constexprs of a tile, no step of which has two scales of a row."""
    widths = [width for width in (settings["WIDE_A"], settings["WIDE_B"]) if width]
    return blocks(tile) | {"BLOCK_K": min([tile.k, *widths])}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")


_TYPES = {"e4m3fn": "fp8e4nv", "e5m2": "fp8e5", "e4m3fnuz": "fp8e4b8", "e5m2fnuz": "fp8e5b16"}
#: By chip, the instruction that multiplies 8-bit numbers.
_UNITS = {
    **dict.fromkeys(("sm89", "sm120"), "mma.sync of e4m3"),
    "sm90": "wgmma of e4m3",
    "sm100": "tcgen05 of f8f6f4",
    "gfx942": "v_mfma of fp8",
    "gfx950": "v_mfma of f8f6f4",
    "gfx1201": "v_wmma of fp8",
}
#: ... and those of 16 bits.
_HALVES = {
    **dict.fromkeys(NVIDIA, "mma.sync of f16"), "sm90": "wgmma of f16", "sm100": "tcgen05",
    **dict.fromkeys(AMD, "v_mfma of f16"), **dict.fromkeys(("gfx1100", "gfx1201"), "v_wmma of f16"),
    **dict.fromkeys(INTEL, "dpas of f16"),
}  # fmt: skip


def _contracts(native: bool, formats: tuple[torch.dtype, torch.dtype], out: torch.dtype, step: int) -> dict[str, str]:
    """Return the contract of each chip, of codes as they are or widened, with steps of so many numbers at most."""
    found = {}
    for chip, memory in MEMORY.items():
        if native != multiplies_codes(chip, *formats, out):
            found[chip] = _OTHER[native]
            continue
        unit = _UNITS[chip] if native else _HALVES[chip]
        if step < 64:  # gfx950's larger units have 64 numbers and more
            unit = unit.replace("v_mfma of f8f6f4", "v_mfma of fp8")
        clauses = (unit, "cp.async" * (chip in NVIDIA), "no spills" * (chip not in INTEL), memory)
        found[chip] = ", ".join(filter(None, clauses))
    return found


_OTHER = {
    True: "not offered: these codes are widened there",
    False: "not offered: the codes themselves are multiplied there",
}


def _program(
    name: str,
    formats: tuple[torch.dtype, torch.dtype],
    by: tuple[str, str],
    rows: int = 1024,
    out: torch.dtype = torch.bfloat16,
    **more: bool,
) -> tuple[Program, Program]:
    """Return the programs of a kind of call: of codes as they are, and of codes that are widened."""
    constants = {"BIAS": False, "EVEN_K": True, **more}
    step = min(filter(None, (_SHARED[by[0]][1], _SHARED[by[1]][1])), default=128)

    def made(native: bool) -> Program:
        def of_chip(chip: str) -> Mapping[str, Mapping[str, Any]]:
            settings = _settings(chip, *formats, out, *by)
            tiles: Tiles = lambda chip: [default_tile(chip, rows, not native)]  # noqa: E731
            return launches(tiles, lambda tile: _constants(tile, settings), settings | constants)(chip)

        a, b = (_TYPES[_short(dtype)] if native else "u8" for dtype in formats)
        signature = {
            **pointers("a", a), **pointers("b", b), **pointers("out bias", BF16 if out is torch.bfloat16 else FP32),
            **pointers("scale_a scale_b", FP32), **integers("N K stride_am stride_bn"),
            **integers("M stride_sam stride_sak stride_sbn stride_sbk", ""),
        }  # fmt: skip
        contracts = _contracts(native, formats, out, step)
        if out is torch.float32 and not native:
            contracts = spilling(contracts, {"sm86": 24, "sm89": 24})
        return Program(name if native else f"{name}, widened", scaled_mm_kernel, signature, contracts, of_chip)

    return made(True), made(False)


_E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
_E4M3_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)
_E5M2 = (torch.float8_e5m2, torch.float8_e4m3fn)
_ROWS, _BLOCKS, _MX = ("row", "row"), ("1x128", "128x128"), ("1x32", "1x32")
AOT = (
    *_program("e4m3, rows", _E4M3, _ROWS, BIAS=True),
    *_program("e4m3, rows, 64", _E4M3, _ROWS, 64),
    *_program("e4m3, rows, few", _E4M3, _ROWS, 16),
    *_program("e4m3, blocks", _E4M3, _BLOCKS),
    *_program("e4m3, blocks, 64", _E4M3, _BLOCKS, 64),
    *_program("e4m3, blocks, few", _E4M3, _BLOCKS, 16),
    *_program("e4m3, blocks, partial", _E4M3, _BLOCKS, EVEN_K=False, BIAS=True),
    *_program("e4m3, blocks, float32", _E4M3, _BLOCKS, out=torch.float32),
    *_program("e4m3, 1x32", _E4M3, _MX),
    *_program("e5m2 by e4m3, rows", _E5M2, _ROWS),
    *_program("e4m3fnuz, rows", _E4M3_FNUZ, _ROWS, BIAS=True),
    *_program("e4m3fnuz, blocks", _E4M3_FNUZ, _BLOCKS),
    *_program("e4m3fnuz, blocks, few", _E4M3_FNUZ, _BLOCKS, 16),
)
