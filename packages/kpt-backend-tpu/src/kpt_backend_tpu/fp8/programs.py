"""List what the kernels are compiled for ahead of time, and what their code must be, chip by chip."""

from functools import partial
from typing import Any

from kpt_backend_tpu.chips import CHIPS
from kpt_backend_tpu.programs import Arguments, Program

_E4M3 = "float8_e4m3fn"
#: Of published models: many rows, a step of decoding, and sizes that are no multiple of anything.
_SIZES: dict[str, dict[str, Any]] = {
    "prefill": {"rows": 4096, "inner": 4096, "columns": 14336},
    "decode": {"rows": 8, "inner": 7168, "columns": 2048},
    "odd": {"rows": 1001, "inner": 333, "columns": 70},
}
_SCALES = {"row": ("row", "row"), "block": ("1x128", "128x128")}


def _scale(rows: int, inner: int, granularity: str) -> tuple[Any, ...]:
    height, _, width = granularity.partition("x")
    return ("float32", rows) if granularity == "row" else ("float32", -(-rows // int(height)), -(-inner // int(width)))


def _product(out_dtype: str, granularities: tuple[str, str], rows: int, inner: int, columns: int) -> Arguments:
    of_b = _scale(columns, inner, granularities[1])
    arrays = (
        (_E4M3, rows, inner),
        (_E4M3, inner, columns),
        _scale(rows, inner, granularities[0]),
        of_b if len(of_b) == 2 else (of_b[0], *of_b[:0:-1]),
        None,
    )
    return arrays, {"granularities": granularities, "out_dtype": out_dtype}


def _quantised(dtype: str, granularity: str, rows: int, inner: int, columns: int) -> Arguments:
    return ((dtype, rows, inner),), {"format": _E4M3, "granularity": granularity, "rounding": "none"}


scaled_mm = tuple(
    Program(
        name=f"forward {name} {short}",
        function="scaled_mm:forward",
        sizes=_SIZES,
        arguments=partial(_product, dtype, granularities),
        contracts=dict.fromkeys(CHIPS, "mosaic, mxu of bf16, spills <= 4096 KiB, vmem <= 8 MiB"),
    )
    for short, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    for name, granularities in _SCALES.items()
)
quantize = tuple(
    Program(
        name=f"forward {granularity}",
        function="quantize:forward",
        sizes=_SIZES,
        arguments=partial(_quantised, "bfloat16", granularity),
        contracts=dict.fromkeys(CHIPS, "mosaic, spills <= 4096 KiB, vmem <= 8 MiB"),
    )
    for granularity in ("row", "1x128", "128x128")
)
