"""The case table of `fp8.quantize`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_core import UnknownNameError
from kpt_fp8.formats import FP8_DTYPES
from kpt_fp8.scales import ROUNDINGS
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain

from .common import GRANULARITIES, SCALES, SIZES, STACKS, affordable, normal, scales, wrong_input

_wrong = partial(wrong_input, "fp8.quantize")


def _build(
    generator: torch.Generator,
    rows: int = 5,
    inner: int = 40,
    format: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "tensor",
    scale_dtype: torch.dtype = torch.float32,
    scale_rounding: str = "none",
    given: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    spread: str = "normal",
    stacked: tuple[int, ...] = (),
) -> Arguments:
    shape = (*stacked, rows, inner)
    x = normal(generator, *shape)
    if spread == "wide":  # rows whose sizes are far apart, and single numbers that are far larger
        x = x * torch.exp2(normal(generator, *shape[:-1], 1, scale=8))
        x = torch.where(torch.rand(shape, generator=generator) < 0.01, x * 50, x)
    if spread == "zeros":
        x = torch.where(torch.rand(*shape[:-1], 1, generator=generator) < 0.5, 0.0, x)
    if spread == "edges":
        x = torch.where(torch.arange(inner) == 0, _edges(generator, *shape[:-1], 1, format=format), x.clamp(-1, 1) / 64)
    arguments: Arguments = {"x": x, "dtype": format, "granularity": granularity, "stochastic": stochastic}
    if stochastic:
        arguments |= {"seed": seed, "offset": offset}
    if given:
        # Some numbers saturate.
        return {**arguments, "scale": scales(generator, shape, granularity, format, scale_dtype)}
    return {**arguments, "scale_dtype": scale_dtype, "scale_rounding": scale_rounding}


def _edges(generator: torch.Generator, *shape: int, format: torch.dtype) -> Tensor:
    """Magnitudes one step of float32 past or short of those whose scale is a power of two: `log2` rounds there."""
    drawn = torch.randint(2, (2, *shape), generator=generator)
    power = torch.exp2(torch.randint(-5, 1, shape, generator=generator).double())
    return torch.where(drawn[0] == 0, torch.finfo(format).max, 1.0) * power * (1 + (2 * drawn[1] - 1) * 2.0**-23)


def _allowed(values: Mapping[str, Any]) -> bool:
    if not values["stochastic"] and (values["seed"], values["offset"]) != (0, 0):
        return False
    rounded = values["scale_rounding"] != "none"
    return not rounded if values["given"] else rounded or values["scale_dtype"] is torch.float32


QUANTIZE = CaseTable(
    op="fp8.quantize",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0, "granularity": "row"}),
        Case(name="nothing in rows", sizes={"inner": 0, "granularity": "1x128"}),
        Case(name="one row", sizes={"rows": 1, "granularity": "row"}),
        Case(name="63 rows", sizes={"rows": 63, "inner": 33, "granularity": "row"}),
        Case(name="blocks of rows", sizes={"rows": 3, "inner": 300, "granularity": "1x128"}),
        Case(name="square blocks that end early", sizes={"rows": 130, "inner": 200, "granularity": "128x128"}),
        Case(
            name="square blocks of a stack",
            sizes={"rows": 130, "inner": 130, "granularity": "128x128", "stacked": (2,)},
        ),
        Case(
            name="MXFP8",
            sizes={"inner": 96, "granularity": "1x32", "scale_dtype": torch.float8_e8m0fnu, "scale_rounding": "up"},
        ),
        Case(
            name="MXFP8 of OCP 1.0",
            sizes={"inner": 96, "granularity": "1x32", "scale_dtype": torch.float8_e8m0fnu, "scale_rounding": "down"},
        ),
        Case(
            name="near powers of two, up",
            sizes={"rows": 33, "granularity": "row", "spread": "edges", "scale_rounding": "up"},
        ),
        Case(
            name="near powers of two, down",
            sizes={"rows": 33, "granularity": "row", "spread": "edges", "scale_rounding": "down"},
        ),
        Case(name="four dimensions", sizes={"rows": 3, "stacked": (3, 2), "granularity": "row"}),
        Case(name="a given scale", sizes={"given": True}),
        Case(name="given scales of rows", sizes={"given": True, "granularity": "row"}),
        Case(name="stochastic", sizes={"stochastic": True}),
        Case(name="stochastic e5m2", sizes={"stochastic": True, "format": torch.float8_e5m2, "granularity": "row"}),
        Case(name="rows of zeros", sizes={"rows": 9, "granularity": "row", "spread": "zeros"}),
        Case(name="qwen3-30b-a3b", sizes={"rows": 512, "inner": 2048, "granularity": "1x128"}, model=True),
        Case(name="llama-3.1-8b", sizes={"rows": 4096, "inner": 14336, "granularity": "row"}, model=True, large=True),
    ),
    wrong=(
        _wrong("integers", r"x must be float64.*got torch\.int64", x=lambda a: a["x"].long()),
        _wrong("not 8 bits", r"dtype must be float8_e4m3fn.*got torch\.float16", dtype=torch.float16),
        _wrong(
            "no such granularity",
            "unknown granularity 'rows': did you mean 'row'",
            error=UnknownNameError,
            granularity="rows",
        ),
        _wrong(
            "no such rounding",
            "unknown scale_rounding 'upp': did you mean 'up'",
            error=UnknownNameError,
            scale_rounding="upp",
        ),
        _wrong(
            "square blocks of a vector",
            r"x must have 2 dimensions at least .*'128x128'; got \[40\]",
            x=lambda a: a["x"][0],
            granularity="128x128",
        ),
        _wrong(
            "exponents that are no powers of two",
            r"scales of float8_e8m0fnu are powers of two; got scale_rounding='none'",
            scale_dtype=torch.float8_e8m0fnu,
        ),
        _wrong(
            "scales of bfloat16",
            r"scale_dtype must be float32, float64 or float8_e8m0fnu; got torch\.bfloat16",
            scale_dtype=torch.bfloat16,
        ),
        _wrong(
            "a scale of another shape",
            r"scale must be float32.*\[5\].*'row'; got torch\.float32 \[4\]",
            scale=torch.ones(4),
            granularity="row",
        ),
        _wrong("two devices", r"x is on cpu, but scale on meta", scale=torch.ones((), device="meta")),
    ),
    rare=(torch.float64,),
    exact=True,
    domain=Domain(
        sizes=SIZES,
        options={
            "format": FP8_DTYPES,
            "granularity": GRANULARITIES,
            "scale_dtype": SCALES,
            "scale_rounding": ROUNDINGS,
            "given": (False, True),
            "stochastic": (False, True),
            "seed": (0, 2**40 + 7, 0xBE00, -3),
            "offset": (0, 2**32 - 9),
            "spread": ("normal", "wide", "zeros", "edges"),
            "stacked": STACKS,
        },
        sized=("granularity",),
        allowed=lambda values: _allowed(values) and affordable(values),
    ),
)
