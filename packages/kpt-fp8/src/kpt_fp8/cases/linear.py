"""The case table of `fp8.linear`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kpt_core import UnknownNameError
from kpt_fp8.formats import FP8_DTYPES
from kpt_fp8.linear import NONE
from kpt_fp8.scales import ROUNDINGS
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain

from .common import COLUMNS, GRANULARITIES, SCALES, SIZES, affordable, codes, normal, scales, wrong_input

_wrong = partial(wrong_input, "fp8.linear")


def _build(
    generator: torch.Generator,
    rows: int = 5,
    inner: int = 40,
    columns: int = 6,
    format: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    scale_dtype: torch.dtype = torch.float32,
    biased: bool = False,
    activations: str = NONE,
    activation_dtype: torch.dtype = torch.float8_e4m3fn,
    activation_rounding: str = "none",
    static: bool = False,
) -> Arguments:
    shape = (rows, inner)
    x = normal(generator, *shape)
    if activations != NONE:
        x[1::4] = 0  # rows whose largest element no scale can be made of
    arguments: Arguments = {
        "x": x,
        "weight": codes(generator, columns, inner, dtype=format),
        "scale": scales(generator, (columns, inner), granularity, format, scale_dtype),
        "bias": normal(generator, columns) if biased else None,
        "granularity": granularity,
    }
    if activations == NONE:
        return arguments
    arguments |= {
        "activations": activations,
        "activation_dtype": activation_dtype,
        "activation_rounding": activation_rounding,
    }
    if static:
        # A good part of the activations saturates.
        arguments["input_scale"] = scales(generator, shape, activations, activation_dtype, scale_dtype, most=1.0)
    return arguments


def _allowed(values: Mapping[str, Any]) -> bool:
    if values["activations"] != NONE:
        return values["activation_rounding"] == "none" or not values["static"]
    plain = (values["activation_dtype"], values["activation_rounding"], values["static"])
    return plain == (torch.float8_e4m3fn, "none", False)


_BLOCKS = {"granularity": "128x128", "activations": "1x128"}
LINEAR = CaseTable(
    op="fp8.linear",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0}),
        Case(name="one row", sizes={"rows": 1, "biased": True}),
        Case(name="63 rows, odd sizes", sizes={"rows": 63, "inner": 33, "columns": 17, "biased": True}),
        # So many that one rounding more than there has to be shows in the mean error.
        Case(name="many results", sizes={"rows": 1024, "inner": 256, "columns": 1024, "biased": True}, model=True),
        Case(name="one scale", sizes={"granularity": "tensor"}),
        Case(name="blocks that end early", sizes={"inner": 200, "columns": 136, "granularity": "128x128"}),
        Case(name="MXFP8", sizes={"inner": 96, "granularity": "1x32", "scale_dtype": torch.float8_e8m0fnu}),
        Case(name="dynamic activations", sizes={"activations": "row"}),
        Case(name="static activations", sizes={"activations": "tensor", "static": True, "granularity": "tensor"}),
        Case(
            name="blocks of activations and weight",
            sizes={"inner": 200, "columns": 136, "activations": "1x128", "granularity": "128x128"},
        ),
        Case(
            name="qwen3-30b-a3b",
            sizes={"rows": 64, "inner": 2048, "columns": 768, "granularity": "128x128"},
            model=True,
        ),
        Case(name="llama-3.1-8b", sizes={"rows": 4096, "inner": 4096, "columns": 14336}, model=True, large=True),
    ),
    wrong=(
        _wrong(
            "x of three dimensions",
            r"x must be \[M, K\] and weight \[N, K\].*got \[1, 5, 40\] and \[6, 40\]",
            x=lambda a: a["x"][None],
        ),
        _wrong(
            "weight of floats",
            r"weight must be float8_e4m3fn.*got torch\.float32",
            weight=lambda a: a["weight"].float(),
        ),
        _wrong(
            "scales of bfloat16",
            r"scale must be float32.*\[6\].*got torch\.bfloat16 \[6\]",
            scale=lambda a: a["scale"].bfloat16(),
        ),
        _wrong(
            "bias of another dtype",
            r"bias must have x's dtype, torch\.float32; got torch\.float16",
            bias=torch.ones(6, dtype=torch.float16),
        ),
        _wrong(
            "no such granularity of activations",
            "unknown granularity of activations 'token'",
            error=UnknownNameError,
            activations="token",
        ),
        _wrong(
            "an input scale for nothing",
            r"input_scale is for quantised activations; got activations='none'",
            input_scale=torch.ones(()),
        ),
        _wrong(
            "weight that wants a gradient",
            r"scale is quantised or scales .* got requires_grad=True",
            scale=lambda a: a["scale"].detach().requires_grad_(),
        ),
    ),
    gradients=("x", "bias"),
    reduction=lambda arguments: max(*arguments["x"].shape, int(arguments["weight"].shape[0])),
    estimated=lambda arguments: arguments.get("activations", NONE) != NONE,
    rare=(torch.float64,),
    domain=Domain(
        sizes={**SIZES, "columns": COLUMNS},
        options={
            "format": FP8_DTYPES,
            "granularity": ("row", *(name for name in GRANULARITIES if name != "row")),
            "scale_dtype": SCALES,
            "biased": (False, True),
            "activations": (NONE, *GRANULARITIES),
            "activation_dtype": FP8_DTYPES,
            "activation_rounding": ROUNDINGS,
            "static": (False, True),
        },
        sized=("granularity", "activations"),
        families={
            "DeepSeek-V3, a step": {"rows": 3, "inner": 1_536, "columns": 520, **_BLOCKS},
            "DeepSeek-V3": {"rows": 200, "inner": 1_200, "columns": 390, **_BLOCKS},
            "Llama 3.1, FBGEMM": {"rows": 17, "inner": 2_048, "columns": 520, "activations": "row"},
            "Llama 3.1, static": {
                "rows": 17,
                "inner": 2_048,
                "columns": 520,
                "granularity": "tensor",
                "activations": "tensor",
                "static": True,
            },
            "SmolLM2, weights alone": {"rows": 1, "inner": 1_536, "columns": 576},
        },
        allowed=lambda values: _allowed(values) and affordable(values),
    ),
)
