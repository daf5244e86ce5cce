"""Contracts of all that `moe.experts` launches."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kpt_triton.aot import Program
from kpt_triton.contracts import (
    BF16,
    E4M3,
    FP16,
    FP32,
    Tiles,
    blocks,
    integers,
    launches,
    lean,
    pointers,
    products,
    products_by_descriptors,
    spilling,
    unaligned,
    unaligned_fp32,
)
from kpt_triton.moe import combine, sorting
from kpt_triton.moe.activation import GATED, PLAIN
from kpt_triton.moe.experts_backward import parts_of, slope_kernel
from kpt_triton.moe.experts_forward import up_kernel
from kpt_triton.tile import Tile

from . import decode, grouped_mm, grouped_mm_wgrad
from .common import ROWS, every, multiplying_codes, of_units, usual, weight_descriptor, weight_strides

_ALWAYS = {
    "EXPERTS": 128, "EVEN_K": True, "EVEN_N": True, "NAME": "swiglu", "IS_GATED": True, "INTERLEAVED": False,
    "LIMITED": False, "BIAS": False, "SCALE": "", "LAYOUT": "", "PRECISION": "ieee",
}  # fmt: skip
_UP = {**_ALWAYS, "SAVE": True, "X_SCALE": "", "CODES": ""}
_SLOPE = {**_ALWAYS, "NEED_H": True, "NEED_WEIGHTED": True, "NEED_DOTS": True}
_ACTIVATION = dict.fromkeys(("alpha", "beta", "limit"), "fp32")


def _up(
    name: str,
    dtype: str,
    contracts: Mapping[str, str],
    tiles: Tiles,
    *,
    weight: str = "",
    out: str = "",
    layout: str = "NK",
    hint: str = ":16",
    types: Mapping[str, str] | None = None,
    **constants: Any,
) -> Program:
    signature = {
        **pointers("x", dtype),
        **pointers("out h bias", out or dtype),
        **pointers("w", weight or dtype),
        **pointers("scale x_scale", FP32),
        **pointers("offsets order", "i32"),
        **integers("N K width stride_xr stride_or stride_hr stride_be", hint),
        **integers("rows experts top_k stride_se stride_sk stride_sn stride_xsr", ""),
        **_ACTIVATION,
        **weight_strides(layout, hint),
        **(types or {}),
    }
    return Program(f"up {name}", up_kernel, signature, contracts, launches(tiles, blocks, _UP | constants))


def _up_of_codes(name: str, tiles: Tiles, spills: Mapping[str, int] | None = None, **constants: Any) -> Program:
    contracts = spilling(of_units(aligned=constants.get("hint") != ""), spills or {})
    return multiplying_codes(_up(f"e4m3 by e4m3, {name}", E4M3, contracts, tiles, out=BF16, SAVE=False, **constants))


def _down_of_codes(name: str, tiles: Tiles, **constants: Any) -> Program:
    contracts = spilling(of_units(), {"sm120": 8, "gfx1201": 16})
    given = grouped_mm.program(
        f"down e4m3 by e4m3, {name}", E4M3, contracts, tiles, weight=E4M3, out=BF16, **_WEIGHTED, **constants
    )
    return multiplying_codes(given)


def _slope(
    name: str,
    dtype: str,
    contracts: Mapping[str, str],
    tiles: Tiles,
    *,
    weight: str = "",
    layout: str = "KN",
    hint: str = ":16",
    types: Mapping[str, str] | None = None,
    **constants: Any,
) -> Program:
    signature = {
        **pointers("grad h grad_h weighted bias", dtype),
        **pointers("w", weight or dtype),
        **pointers("scale dots weights", FP32),
        **pointers("offsets order", "i32"),
        **integers("N K width stride_gr stride_hr stride_ar stride_be", hint),
        **integers("rows experts top_k stride_dn stride_se stride_sk stride_sn", ""),
        **_ACTIVATION,
        **weight_strides(layout, hint),
        **(types or {}),
    }
    fixed: dict[str, Any] = {**_SLOPE, **constants}

    def of_tile(tile: Tile) -> dict[str, int]:
        return {**blocks(tile), "PARTS": parts_of(tile, fixed["INTERLEAVED"])}

    return Program(f"slope {name}", slope_kernel, signature, contracts, launches(tiles, of_tile, fixed))


def _activations(make: Callable[..., Program], names: tuple[str, ...], product: str) -> Program:
    """One program of several activations: on sm90 each, elsewhere that by the error function, which is longest."""
    gated = names[0] in GATED
    program = make(
        f"bf16, {'gated' if gated else 'plain'} activations",
        BF16,
        products(BF16),
        usual(product),
        IS_GATED=gated,
        BIAS=not gated,
    )

    def of_chip(chip: str) -> Mapping[str, Mapping[str, Any]]:
        chosen = names if chip == "sm90" else [name for name in names if name in ("gelu", "geglu")]
        ((tile, launch),) = program.launches(chip).items()
        return {f"{name} {tile}": {**launch, "NAME": name} for name in chosen}

    return replace(program, launches=of_chip)


_FEW = products(BF16, tall=False)
_FEW_UNALIGNED = unaligned(BF16, tall=False)
_WIDENED = products(BF16)
_BIASED: dict[str, Any] = {"INTERLEAVED": True, "LIMITED": True, "BIAS": True}
_UNALIGNED: dict[str, Any] = {"hint": "", "EVEN_K": False, "EVEN_N": False, **_BIASED}
_BY_DESCRIPTORS = products_by_descriptors(BF16)
_ROWS: dict[str, Any] = {"SCALE": "n", "X_SCALE": "row"}
_BLOCKS: dict[str, Any] = {"SCALE": "block", "X_SCALE": "block"}
_NK: dict[str, Any] = {"types": weight_descriptor("NK", BF16), "LAYOUT": "NK"}
_KN: dict[str, Any] = {"types": weight_descriptor("KN", BF16), "LAYOUT": "KN"}
_WEIGHTED: dict[str, Any] = {"TAIL": False, "WEIGHTS": True}

_UPS = (
    _up("bf16", BF16, products(BF16), every("pair")),
    _up("bf16, few rows", BF16, _FEW, every("pair", tall=False), SAVE=False),
    _up("bf16, weights by descriptors", BF16, _BY_DESCRIPTORS, every("pair", descriptors=True), **_NK),
    _up("bf16, interleaved, biases", BF16, products(BF16), usual("pair"), layout="KN", **_BIASED),
    _up("bf16, unaligned", BF16, unaligned(BF16), usual("pair", aligned=False), **_UNALIGNED),
    _up("bf16, unaligned, few rows", BF16, _FEW_UNALIGNED, usual("pair", 16, aligned=False), **_UNALIGNED),
    _up("bf16, without a gate", BF16, products(BF16), every("crowded"), NAME="silu", IS_GATED=False),
    _up(
        "bf16, without a gate, few rows",
        BF16,
        products(BF16, tall=False),
        usual("crowded", *ROWS[:2]),
        NAME="silu",
        IS_GATED=False,
    ),
    _activations(_up, GATED[1:], "pair"),
    _activations(_up, PLAIN, "crowded"),
    _up("bf16 by e4m3, columns", BF16, _WIDENED, usual("pair"), weight=E4M3, SCALE="n"),
    _up("bf16 by e4m3, blocks", BF16, spilling(_WIDENED, {"gfx1100": 120}), usual("pair"), weight=E4M3, SCALE="block"),
    _up_of_codes("blocks", usual("pair_codes", 64, 1024), **_BLOCKS),
    _up_of_codes("rows and columns", usual("pair_codes", 64, 1024), **_ROWS),
    _up_of_codes("blocks, partial tiles", usual("pair_codes"), {"sm120": 72}, EVEN_K=False, EVEN_N=False, **_BLOCKS),
    _up_of_codes("blocks, interleaved, biases", usual("pair_codes"), layout="KN", **_BIASED, **_BLOCKS),
    _up_of_codes("blocks, unaligned", usual("pair_codes", aligned=False), **_UNALIGNED, **_BLOCKS),
    _up_of_codes("blocks, without a gate", usual("crowded_codes"), NAME="silu", IS_GATED=False, **_BLOCKS),
    _up("fp16", FP16, products(FP16), usual("pair")),
    _up("fp32", FP32, lean("cp.async"), usual("pair", 16, 1024, itemsize=4)),
    _up("fp32, unaligned", FP32, unaligned_fp32(), usual("pair", 16, 1024, itemsize=4, aligned=False), **_UNALIGNED),
)
_SLOPES = (
    _slope("bf16", BF16, products(BF16), every("slope")),
    _slope("bf16, few rows", BF16, _FEW, every("slope", tall=False)),
    _slope("bf16, weights by descriptors", BF16, _BY_DESCRIPTORS, every("slope", descriptors=True), **_KN),
    _slope("bf16, interleaved, biases", BF16, products(BF16), usual("slope"), layout="NK", **_BIASED),
    # 8 B for a second program on a processor: in one part they have 180 registers, and none.
    _slope(
        "bf16, unaligned",
        BF16,
        spilling(unaligned(BF16), dict.fromkeys(("sm80", "sm86", "sm89"), 8)),
        usual("slope", aligned=False),
        **_UNALIGNED,
    ),
    _slope("bf16, unaligned, few rows", BF16, _FEW_UNALIGNED, usual("slope", 16, aligned=False), **_UNALIGNED),
    _slope("bf16, gradient of h alone", BF16, products(BF16), usual("slope"), NEED_WEIGHTED=False, NEED_DOTS=False),
    _slope("bf16, all but that", BF16, products(BF16), usual("slope"), NEED_H=False),
    _activations(_slope, GATED[1:], "slope"),
    _activations(_slope, PLAIN, "slope"),
    _slope("bf16 by e4m3, K", BF16, _WIDENED, usual("slope"), weight=E4M3, SCALE="k"),
    _slope("bf16 by e4m3, blocks", BF16, _WIDENED, usual("slope"), weight=E4M3, SCALE="block"),
    _slope("fp16", FP16, products(FP16), usual("slope")),
    _slope("fp32", FP32, lean("cp.async"), usual("slope", 16, 1024, itemsize=4)),
    _slope(
        "fp32, unaligned", FP32, unaligned_fp32(), usual("slope", 16, 1024, itemsize=4, aligned=False), **_UNALIGNED
    ),
)
_DOWNS = (
    grouped_mm.program("down bf16", BF16, products(BF16), usual("plain", 64, 1024), **_WEIGHTED),
    grouped_mm.program("down bf16, few rows", BF16, _FEW, usual("plain", *ROWS[:2]), **_WEIGHTED),
    grouped_mm.program(
        "down bf16, gathered", BF16, products(BF16), usual("plain"), **_WEIGHTED, BIAS=True, GATHER=True
    ),
    _down_of_codes("blocks", usual("crowded_codes", 64, 1024), **_BLOCKS),
    _down_of_codes("rows and columns, biases", usual("crowded_codes", 64, 1024), BIAS=True, **_ROWS),
    grouped_mm.program("down fp32, biases", FP32, lean("cp.async"), usual("plain", itemsize=4), **_WEIGHTED, BIAS=True),
)
_WGRADS = (
    grouped_mm_wgrad.program("wgrad bf16, x gathered", BF16, products(BF16), usual("wgrad"), GATHER_X=True),
    grouped_mm_wgrad.program("wgrad bf16, gradient gathered", BF16, products(BF16), usual("wgrad"), GATHER_GRAD=True),
)

AOT = (*sorting.AOT, *_UPS, *_DOWNS, *decode.AOT, *combine.AOT, *_SLOPES, *_WGRADS)
