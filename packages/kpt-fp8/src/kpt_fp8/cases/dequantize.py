"""The case table of `fp8.dequantize`."""

from functools import partial

import torch

from kpt_core import UnknownNameError
from kpt_fp8.formats import FORMATS, FP8_DTYPES
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain

from .common import GRANULARITIES, SCALES, SIZES, STACKS, affordable, codes, scales, wrong_input

_wrong = partial(wrong_input, "fp8.dequantize")


def _build(
    generator: torch.Generator,
    rows: int = 5,
    inner: int = 40,
    format: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "tensor",
    scale_dtype: torch.dtype = torch.float32,
    stacked: tuple[int, ...] = (),
    every: bool = False,
) -> Arguments:
    shape = (*stacked, rows, inner)
    made = codes(generator, *shape, dtype=format)
    if every and made.numel():
        # The largest first: among a few that are small alone, float16 has too few digits to judge anything.
        code = torch.arange(made.numel()) * 37 + FORMATS[format].special - 1
        made = code.to(torch.uint8).view(format).view(shape)
    scale = scales(generator, shape, granularity, format, scale_dtype)
    if every and scale_dtype is torch.float8_e8m0fnu:
        # Of exponents alone every code but that of NaN, likewise not the least first: 127 stands for one.
        scale = ((127 + torch.arange(scale.numel()) * 37) % 255).to(torch.uint8).view(scale_dtype).view(scale.shape)
    return {
        "codes": made,
        "scale": scale,
        "granularity": granularity,
        # Becomes that of the run.
        "dtype": torch.float64,
    }


DEQUANTIZE = CaseTable(
    op="fp8.dequantize",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0, "granularity": "row"}),
        Case(name="nothing in rows", sizes={"inner": 0, "granularity": "1x128"}),
        Case(name="one row", sizes={"rows": 1, "granularity": "row"}),
        Case(name="63 rows", sizes={"rows": 63, "inner": 33, "granularity": "row"}),
        Case(name="every code", sizes={"rows": 16, "inner": 16, "every": True}),
        Case(name="every code of e5m2", sizes={"rows": 16, "inner": 16, "every": True, "format": torch.float8_e5m2}),
        Case(name="four dimensions", sizes={"rows": 3, "stacked": (3, 2), "granularity": "row"}),
        Case(
            name="every exponent",
            sizes={"rows": 16, "inner": 512, "every": True, "granularity": "1x32", "scale_dtype": torch.float8_e8m0fnu},
        ),
        Case(name="square blocks that end early", sizes={"rows": 130, "inner": 200, "granularity": "128x128"}),
        Case(name="MXFP8", sizes={"inner": 96, "granularity": "1x32", "scale_dtype": torch.float8_e8m0fnu}),
        Case(name="qwen3-30b-a3b", sizes={"rows": 768, "inner": 2048, "granularity": "128x128"}, model=True),
        Case(name="llama-3.1-8b", sizes={"rows": 14336, "inner": 4096, "granularity": "row"}, model=True, large=True),
    ),
    wrong=(
        _wrong(
            "codes of floats", r"codes must be float8_e4m3fn.*got torch\.float32", codes=lambda a: a["codes"].float()
        ),
        _wrong("no such granularity", "unknown granularity '128'", error=UnknownNameError, granularity="128"),
        _wrong(
            "a scale for each column",
            r"scale must be float32.*\[5\].*'row'; got torch\.float32 \[40\]",
            scale=torch.ones(40),
            granularity="row",
        ),
        _wrong("a result of 8 bits", r"dtype must be float64.*got torch\.float8_e5m2", dtype=torch.float8_e5m2),
        _wrong("two devices", r"codes is on cpu, but scale on meta", scale=torch.ones((), device="meta")),
        _wrong(
            "scales that want a gradient",
            r"scale is quantised or scales .* got requires_grad=True",
            scale=torch.ones((), requires_grad=True),
        ),
    ),
    rare=(torch.float64,),
    exact=True,
    domain=Domain(
        sizes=SIZES,
        options={
            "format": FP8_DTYPES,
            "granularity": GRANULARITIES,
            "scale_dtype": SCALES,
            "stacked": STACKS,
            "every": (False, True),
        },
        sized=("granularity",),
        allowed=affordable,
    ),
)
