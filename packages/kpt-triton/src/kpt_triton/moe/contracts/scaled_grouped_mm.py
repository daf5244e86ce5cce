"""Contracts of `moe.scaled_grouped_mm`, whose 8-bit operands are widened to bfloat16, beside such an x to float32."""

from typing import Any

from kpt_triton.contracts import BF16, E4M3, E5M2, FP32, lean, products

from .common import ROWS, usual
from .grouped_mm import program

_E4M3, _E5M2 = products(BF16, weight=E4M3), products(BF16, weight=E5M2)
_FEW = products(BF16, weight=E4M3, tall=False)
_SCALED_X: dict[str, Any] = {"weight": E4M3, "out": BF16}

AOT = (
    program("bf16 by e4m3, columns", BF16, _E4M3, usual("plain"), weight=E4M3, SCALE="n"),
    program("bf16 by e4m3, columns, few rows", BF16, _FEW, usual("plain", 16), weight=E4M3, SCALE="n"),
    program("bf16 by e4m3, blocks", BF16, _E4M3, usual("crowded", 64, 1024), weight=E4M3, SCALE="block"),
    program("bf16 by e4m3, blocks, few rows", BF16, _FEW, usual("crowded", *ROWS[:2]), weight=E4M3, SCALE="block"),
    program("bf16 by e4m3, K", BF16, _E4M3, usual("crowded"), weight=E4M3, SCALE="k"),
    program("bf16 by e4m3, K, few rows", BF16, _FEW, usual("crowded", 32), weight=E4M3, SCALE="k"),
    program("bf16 by e5m2, columns", BF16, _E5M2, usual("plain"), weight=E5M2, SCALE="n"),
    program("e4m3 by e4m3, rows and columns", E4M3, _E4M3, usual("plain"), **_SCALED_X, SCALE="n", X_SCALE="row"),
    program("e4m3 by e4m3, blocks", E4M3, _E4M3, usual("crowded"), **_SCALED_X, SCALE="block", X_SCALE="block"),
    program(
        "fp32 by e4m3, blocks",
        FP32,
        lean("cp.async", weight=E4M3),
        usual("crowded", itemsize=4),
        weight=E4M3,
        SCALE="block",
    ),
)
