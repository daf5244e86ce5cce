"""What contracts of grouped products share: tiles, types of matrices, and what is promised of products of codes."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kpt_triton.aot import Program
from kpt_triton.chips import SHORT_SUMS
from kpt_triton.contracts import BF16, Tiles, products
from kpt_triton.moe.tiles import candidate_tiles, default_tile
from kpt_triton.tile import Tile

#: Rows of an expert, for which the defaults differ.
ROWS = (16, 32, 64, 1024)
_NO_UNITS = "not offered: it has no units for e4m3fn and e5m2; codes are widened there"
#: What multiplies codes in tiles of 64 rows and more, and in those of fewer.
_UNITS = {
    "sm89": ("mma.sync of e4m3", "mma.sync of e4m3"),
    # Triton widens the codes itself, to float16, where tiles are too small for these.
    "sm90": ("wgmma of e4m3", "mma.sync of f16"),
    "sm100": ("tcgen05 of f8f6f4", "mma.sync of f16"),
    "sm120": ("mma.sync of e4m3", "mma.sync of e4m3"),
    "gfx950": ("v_mfma of f8f6f4", "v_mfma of f8f6f4"),
    "gfx1201": ("v_wmma of fp8", "v_wmma of fp8"),
}


def every(product: str, *, tall: bool = True, descriptors: bool = False, specialize: bool = False) -> Tiles:
    """Return all tiles of 16-bit types that `kpt_triton.moe.tiles` knows for a product, of one kind.

    With `KPT_AOT_TILES=usual` the defaults alone, or the first where none of the kind is a default.
    """
    kind = (tall, descriptors, specialize)

    def of_chip(chip: str) -> Iterable[Tile]:
        found = candidate_tiles(product, chip)
        fitting = [tile for tile in found if (tile.m >= 64, tile.descriptors, tile.specialize) == kind]
        if os.environ.get("KPT_AOT_TILES") != "usual":
            return fitting
        return [tile for tile in usual(product, *ROWS)(chip) if tile in fitting] or fitting[:1]

    return of_chip


def usual(product: str, *rows: int, itemsize: int = 2, aligned: bool = True) -> Tiles:
    """The tiles that are used where nothing was measured, for experts of so many rows: 1024 if none is given."""
    return lambda chip: sorted(
        {default_tile(product, chip, itemsize, number, 1, aligned) for number in rows or (1024,)}, key=str
    )


def weight_strides(layout: str, hint: str = ":16") -> dict[str, str]:
    """Those of matrices in which K is contiguous ("NK") or N ("KN")."""
    inner, outer = ("stride_wk", "stride_wn") if layout == "NK" else ("stride_wn", "stride_wk")
    return {"stride_we": f"i32{hint}", inner: "i32:1", outer: f"i32{hint}"}


def weight_descriptor(layout: str, dtype: str) -> dict[str, str]:
    """The type of a descriptor of the matrices."""
    block = {"NK": "{BLOCK_N}, {BLOCK_K}", "KN": "{BLOCK_K}, {BLOCK_N}"}[layout]
    return {"w": f"tensordesc<{dtype}[{block}]>"}


def of_units(*, tall: bool = True, aligned: bool = True) -> dict[str, str]:
    """Return the contract of each chip for codes that are multiplied as they are."""
    found = {}
    for chip, clauses in products(BF16).items():
        if chip not in _UNITS:
            found[chip] = _NO_UNITS
            continue
        units = _UNITS[chip][not tall]
        if chip == "gfx950" and not aligned:  # steps are too short for f8f6f4
            units = "v_mfma of fp8"
        loads = "cp.async, " if chip.startswith("sm") and aligned else ""
        found[chip] = f"{units}, {loads}{clauses[clauses.index('no spills') :]}"
    return found


def multiplying_codes(given: Program) -> Program:
    """Return a program with codes on both sides as each chip multiplies them; none where it has no units for them."""

    def launches(chip: str) -> Mapping[str, Mapping[str, Any]]:
        if chip not in _UNITS:
            return {}
        how = {"CODES": "promoted" if chip in SHORT_SUMS else "native"}
        return {tile: {**launch, **how} for tile, launch in given.launches(chip).items()}

    return replace(given, launches=launches)
