"""Contracts of `moe.grouped_mm`, and the programs that others make of its kernel."""

from collections.abc import Mapping
from typing import Any

from kpt_triton.aot import Program
from kpt_triton.contracts import (
    BF16,
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
    products_with_own_warps,
    tf32,
    unaligned,
    unaligned_fp32,
)
from kpt_triton.moe.grouped_mm import grouped_mm_kernel

from .common import every, usual, weight_descriptor, weight_strides

_PLAIN = {
    "EXPERTS": 128, "EVEN_K": True, "EVEN_N": True, "GATHER": False, "TAIL": True, "BIAS": False, "WEIGHTS": False,
    "SCALE": "", "X_SCALE": "", "X_DESCRIPTOR": False, "LAYOUT": "", "PRECISION": "ieee", "SPECIALIZE": False,
    "CODES": "",
}  # fmt: skip


def program(
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
    """One program of the kernel.

    Args:
        name: of the program.
        dtype: of x.
        contracts: by chip.
        tiles: what it is compiled with.
        weight: the matrices' type, if it is not x's.
        out: the result's type, if it is not x's.
        layout: "NK" if K is contiguous in the matrices, else "KN".
        hint: what is known of sizes and strides.
        types: of arguments, where they differ.
        constants: constexprs that differ from those of the plain product.
    """
    signature = {
        **pointers("x", dtype),
        **pointers("w", weight or dtype),
        **pointers("out bias", out or dtype),
        **pointers("weights scale x_scale", FP32),
        **pointers("offsets order", "i32"),
        **integers("N K stride_xr stride_or stride_be", hint),
        **integers("rows experts top_k stride_se stride_sk stride_sn stride_xsr", ""),
        **weight_strides(layout, hint),
        **(types or {}),
    }
    return Program(name, grouped_mm_kernel, signature, contracts, launches(tiles, blocks, _PLAIN | constants))


def _by_descriptors(name: str, contracts: Mapping[str, str], tiles: Tiles, layout: str, **constants: Any) -> Program:
    types = {"x": f"tensordesc<{BF16}[{{BLOCK_M}}, {{BLOCK_K}}]>", **weight_descriptor(layout, BF16)}
    constants |= {"X_DESCRIPTOR": True, "LAYOUT": layout}
    return program(name, BF16, contracts, tiles, layout=layout, types=types, **constants)


_PARTIAL: dict[str, Any] = {"EVEN_K": False, "EVEN_N": False}
_UNALIGNED: dict[str, Any] = {"hint": "", **_PARTIAL}
_DESCRIPTORS, _OWN_WARPS = every("plain", descriptors=True), every("plain", descriptors=True, specialize=True)

AOT = (
    program("bf16", BF16, products(BF16), every("plain")),
    program("bf16, few rows", BF16, products(BF16, tall=False), every("plain", tall=False)),
    program("bf16, columns contiguous", BF16, products(BF16), usual("plain"), layout="KN"),
    program("bf16, partial tiles", BF16, products(BF16), usual("plain"), **_PARTIAL),
    program("bf16, unaligned", BF16, unaligned(BF16), usual("plain", aligned=False), **_UNALIGNED),
    program(
        "bf16, unaligned, few rows",
        BF16,
        unaligned(BF16, tall=False),
        usual("plain", 16, aligned=False),
        **_UNALIGNED,
    ),
    _by_descriptors("bf16 by descriptors", products_by_descriptors(BF16), _DESCRIPTORS, "NK"),
    _by_descriptors("bf16 by descriptors, columns contiguous", products_by_descriptors(BF16), _DESCRIPTORS, "KN"),
    _by_descriptors("bf16, loads in own warps", products_with_own_warps(BF16), _OWN_WARPS, "NK", SPECIALIZE=True),
    program("fp16", FP16, products(FP16), usual("plain")),
    program("fp32", FP32, lean("cp.async"), usual("plain", 16, 1024, itemsize=4)),
    program(
        "fp32, unaligned", FP32, unaligned_fp32(), usual("plain", 16, 1024, itemsize=4, aligned=False), **_UNALIGNED
    ),
    program("tf32", FP32, tf32(), usual("plain", itemsize=4), PRECISION="tf32"),
)
