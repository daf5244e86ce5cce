"""Contracts of `moe.scaled_grouped_mm`: 8-bit operands as they are where a chip has units for them, else widened.

A weight beside a wider x is widened to what it is, bfloat16 or float32. Two 8-bit operands are widened to bfloat16 on
chips without units for them, and for a result with more digits than those give.
"""

from typing import Any

from kpt_triton.aot import Program
from kpt_triton.contracts import BF16, E4M3, E5M2, FP32, Tiles, lean, products, spilling

from .common import ROWS, multiplying_codes, of_units, usual
from .grouped_mm import program

_WIDENED = products(BF16)
_FEW = products(BF16, tall=False)
_SCALED_X: dict[str, Any] = {"weight": E4M3, "out": BF16}
_UNALIGNED: dict[str, Any] = {"hint": "", "EVEN_K": False, "EVEN_N": False}


def _codes(
    name: str, tiles: Tiles, *, tall: bool = True, aligned: bool = True, weight: str = E4M3, **constants: Any
) -> Program:
    """Return a program that multiplies the codes themselves, as each chip does."""
    more = {} if aligned else _UNALIGNED
    contracts = of_units(tall=tall, aligned=aligned)
    return multiplying_codes(program(name, E4M3, contracts, tiles, weight=weight, out=BF16, **constants, **more))


_ROWS: dict[str, Any] = {"SCALE": "n", "X_SCALE": "row"}
_BLOCKS: dict[str, Any] = {"SCALE": "block", "X_SCALE": "block"}

AOT = (
    program("bf16 by e4m3, columns", BF16, _WIDENED, usual("plain"), weight=E4M3, SCALE="n"),
    program("bf16 by e4m3, columns, few rows", BF16, _FEW, usual("plain", 16), weight=E4M3, SCALE="n"),
    program("bf16 by e4m3, blocks", BF16, _WIDENED, usual("crowded", 64, 1024), weight=E4M3, SCALE="block"),
    program("bf16 by e4m3, blocks, few rows", BF16, _FEW, usual("crowded", *ROWS[:2]), weight=E4M3, SCALE="block"),
    program("bf16 by e4m3, K", BF16, spilling(_WIDENED, {"gfx1100": 56}), usual("crowded"), weight=E4M3, SCALE="k"),
    program("bf16 by e4m3, K, few rows", BF16, _FEW, usual("crowded", 32), weight=E4M3, SCALE="k"),
    program("bf16 by e5m2, columns", BF16, _WIDENED, usual("plain"), weight=E5M2, SCALE="n"),
    program("e4m3 by e4m3, widened, rows and columns", E4M3, _WIDENED, usual("plain"), **_SCALED_X, **_ROWS),
    program("e4m3 by e4m3, widened, blocks", E4M3, _WIDENED, usual("crowded"), **_SCALED_X, **_BLOCKS),
    _codes("e4m3 by e4m3, rows and columns", usual("codes", *ROWS[2:]), **_ROWS),
    _codes("e4m3 by e4m3, rows and columns, few rows", usual("codes", *ROWS[:2]), tall=False, **_ROWS),
    _codes("e4m3 by e4m3, blocks", usual("crowded_codes", *ROWS[2:]), **_BLOCKS),
    _codes("e4m3 by e4m3, blocks, few rows", usual("crowded_codes", *ROWS[:2]), tall=False, **_BLOCKS),
    _codes("e4m3 by e4m3, blocks, columns contiguous", usual("crowded_codes"), layout="KN", **_BLOCKS),
    _codes("e4m3 by e4m3, blocks, partial tiles", usual("crowded_codes"), EVEN_K=False, EVEN_N=False, **_BLOCKS),
    _codes("e4m3 by e4m3, blocks, unaligned", usual("crowded_codes", aligned=False), aligned=False, **_BLOCKS),
    _codes(
        "e4m3 by e4m3, blocks, unaligned, few rows",
        usual("crowded_codes", 16, aligned=False),
        tall=False,
        aligned=False,
        **_BLOCKS,
    ),
    _codes("e4m3 by e4m3, rows and blocks", usual("crowded_codes"), SCALE="block", X_SCALE="row"),
    _codes("e4m3 by e4m3, blocks and columns", usual("crowded_codes"), SCALE="n", X_SCALE="block"),
    _codes("e4m3 by e4m3, rows and columns, columns contiguous", usual("codes"), layout="KN", **_ROWS),
    _codes("e4m3 by e4m3, rows and columns, partial tiles", usual("codes"), EVEN_K=False, EVEN_N=False, **_ROWS),
    _codes("e4m3 by e5m2, rows and columns", usual("codes"), weight=E5M2, **_ROWS),
    program(
        "fp32 by e4m3, blocks",
        FP32,
        lean("cp.async"),
        usual("crowded", itemsize=4),
        weight=E4M3,
        SCALE="block",
    ),
)
