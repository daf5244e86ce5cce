"""The case table of `fp8.scaled_mm`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kpt_fp8.formats import FP8_DTYPES
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain

from .common import COLUMNS, GRANULARITIES, SCALES, SIZES, affordable, codes, normal, scales, wrong_input

_wrong = partial(wrong_input, "fp8.scaled_mm")


def _build(
    generator: torch.Generator,
    rows: int = 5,
    inner: int = 40,
    columns: int = 6,
    format: torch.dtype = torch.float8_e4m3fn,
    other: torch.dtype = torch.float8_e4m3fn,
    granularity_a: str = "row",
    granularity_b: str = "row",
    scale_dtype: torch.dtype = torch.float32,
    biased: bool = False,
    stored: str = "NK",
) -> Arguments:
    b = codes(generator, columns, inner, dtype=other)
    scale_b = scales(generator, (columns, inner), granularity_b, other, scale_dtype)
    return {
        "a": codes(generator, rows, inner, dtype=format),
        "b": b.t() if stored == "NK" else b.t().contiguous(),
        "scale_a": scales(generator, (rows, inner), granularity_a, format, scale_dtype),
        "scale_b": scale_b.t() if scale_b.dim() == 2 else scale_b,
        "bias": normal(generator, columns) if biased else None,
        "granularity_a": granularity_a,
        "granularity_b": granularity_b,
        # Becomes that of the run.
        "out_dtype": torch.float64,
    }


_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


def _allowed(values: Mapping[str, Any]) -> bool:
    return values["format"] not in _E5M2 or values["other"] not in _E5M2


_BLOCKS = {"granularity_a": "1x128", "granularity_b": "128x128"}
_MX = {"granularity_a": "1x32", "granularity_b": "1x32"}
SCALED_MM = CaseTable(
    op="fp8.scaled_mm",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0}),
        Case(name="one row", sizes={"rows": 1}),
        Case(name="63 rows, odd sizes", sizes={"rows": 63, "inner": 33, "columns": 17, "biased": True}),
        # So many that one rounding more than there has to be shows in the mean error.
        Case(name="many results", sizes={"rows": 1024, "inner": 256, "columns": 1024, "biased": True}, model=True),
        # As the vendors' libraries ask for: in multiples of 16.
        Case(name="whole sizes", sizes={"rows": 17, "inner": 64, "columns": 48, "biased": True}),
        Case(
            name="whole sizes, one scale each",
            sizes={"rows": 17, "inner": 64, "columns": 48, "granularity_a": "tensor", "granularity_b": "tensor"},
        ),
        Case(name="one scale each", sizes={"granularity_a": "tensor", "granularity_b": "tensor"}),
        Case(
            name="blocks that end early",
            sizes={"rows": 9, "inner": 200, "columns": 136, "granularity_a": "1x128", "granularity_b": "128x128"},
        ),
        Case(
            name="MXFP8",
            sizes={"inner": 96, "granularity_a": "1x32", "granularity_b": "1x32", "scale_dtype": torch.float8_e8m0fnu},
        ),
        Case(name="gradients of e5m2", sizes={"format": torch.float8_e5m2}),
        Case(
            name="qwen3-30b-a3b",
            sizes={"rows": 128, "inner": 2048, "columns": 768, "granularity_a": "1x128", "granularity_b": "128x128"},
            model=True,
        ),
        Case(name="llama-3.1-8b", sizes={"rows": 4096, "inner": 4096, "columns": 14336}, model=True, large=True),
    ),
    wrong=(
        _wrong(
            "other K",
            r"a must be \[M, K\] and b \[K, N\] with equal K; got \[5, 39\] and \[40, 6\]",
            a=lambda a: a["a"][:, 1:],
        ),
        _wrong("floats", r"a must be float8_e4m3fn.*got torch\.float32", a=lambda a: a["a"].float()),
        _wrong(
            "e5m2 times e5m2",
            r"a or b must be float8_e4m3fn.*got torch\.float8_e5m2 and torch\.float8_e5m2",
            a=lambda a: a["a"].to(torch.float8_e5m2),
            b=lambda a: a["b"].to(torch.float8_e5m2),
        ),
        _wrong(
            "scales of another granularity",
            r"scale_a must be float32.*\[5, 1\].*'1x128'; got torch\.float32 \[5\]",
            granularity_a="1x128",
        ),
        _wrong("bias of another width", r"bias must be floating \[6\]; got torch\.float32 \[5\]", bias=torch.ones(5)),
        _wrong(
            "a result of 8 bits", r"out_dtype must be float64.*got torch\.float8_e4m3fn", out_dtype=torch.float8_e4m3fn
        ),
    ),
    reduction=lambda arguments: int(arguments["a"].shape[1]),
    rare=(torch.float64,),
    domain=Domain(
        sizes={**SIZES, "columns": COLUMNS},
        options={
            "format": FP8_DTYPES,
            "other": FP8_DTYPES,
            "granularity_a": ("row", *(name for name in GRANULARITIES if name != "row")),
            "granularity_b": ("row", *(name for name in GRANULARITIES if name != "row")),
            "scale_dtype": SCALES,
            "biased": (False, True),
            "stored": ("NK", "KN"),
        },
        sized=("granularity_a", "granularity_b"),
        families={
            "DeepSeek-V3, a step": {"rows": 3, "inner": 1_536, "columns": 528, **_BLOCKS},
            "DeepSeek-V3": {"rows": 200, "inner": 1_200, "columns": 400, **_BLOCKS},
            "Llama 3.1, FBGEMM": {"rows": 17, "inner": 2_048, "columns": 528},
            "MXFP8": {"rows": 40, "inner": 1_056, "columns": 130, "scale_dtype": torch.float8_e8m0fnu, **_MX},
        },
        allowed=lambda values: _allowed(values) and affordable(values),
    ),
)
