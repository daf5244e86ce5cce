"""What the contracts of grouped products share: the tiles that are compiled, and the types of matrices."""

import os
from collections.abc import Iterable

from kpt_triton.contracts import Tiles
from kpt_triton.moe.tiles import candidate_tiles, default_tile
from kpt_triton.tile import Tile

#: Rows of an expert, for which the defaults differ.
ROWS = (16, 32, 64, 1024)


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
