"""Contracts of `moe.grouped_mm_wgrad`, and the programs that `moe.experts` makes of its kernel."""

from collections.abc import Mapping
from typing import Any

from kpt_triton.aot import Program
from kpt_triton.contracts import (
    BF16,
    FP16,
    FP32,
    Tiles,
    integers,
    launches,
    lean,
    pointers,
    products,
    tf32,
    unaligned,
    unaligned_fp32,
)
from kpt_triton.moe.transposed import wgrad_kernel
from kpt_triton.tile import Tile

from .common import every, usual

_PLAIN = {"EVEN_K": True, "EVEN_N": True, "GATHER_X": False, "GATHER_GRAD": False, "PRECISION": "ieee"}
_PARTIAL: dict[str, Any] = {"EVEN_K": False, "EVEN_N": False}


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BLOCK_K": tile.m, "BLOCK_N": tile.n, "BLOCK_R": tile.k, "GROUP": tile.group}


def program(
    name: str, dtype: str, contracts: Mapping[str, str], tiles: Tiles, *, hint: str = ":16", **constants: Any
) -> Program:
    """One program of the kernel.

    Args:
        name: of the program.
        dtype: of x, the gradient and the result.
        contracts: by chip.
        tiles: what it is compiled with.
        hint: what is known of sizes and strides.
        constants: constexprs that differ from those of rows that are read in order, in whole tiles.
    """
    signature = {
        **pointers("x grad out", dtype),
        **pointers("offsets order", "i32"),
        **integers("K N stride_xr stride_gr stride_oe stride_ok", hint),
        **integers("experts top_k", ""),
    }
    return Program(name, wgrad_kernel, signature, contracts, launches(tiles, _blocks, _PLAIN | constants))


AOT = (
    program("bf16", BF16, products(BF16), every("wgrad")),
    program("bf16, partial tiles", BF16, products(BF16), usual("wgrad"), **_PARTIAL),
    program("bf16, unaligned", BF16, unaligned(BF16), usual("wgrad", aligned=False), hint="", **_PARTIAL),
    program("fp16", FP16, products(FP16), usual("wgrad")),
    program("fp32", FP32, lean("cp.async"), usual("wgrad", itemsize=4)),
    program("fp32, unaligned", FP32, unaligned_fp32(), usual("wgrad", itemsize=4, aligned=False), hint="", **_PARTIAL),
    program("tf32", FP32, tf32(), usual("wgrad", itemsize=4), PRECISION="tf32"),
)
