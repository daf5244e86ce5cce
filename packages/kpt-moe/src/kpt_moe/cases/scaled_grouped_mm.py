"""The case table of `moe.scaled_grouped_mm`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_moe._scales import in_blocks
from kpt_optimize.cases import Arguments, CaseTable, Domain

from .common import case, normal, wrong
from .grouped_mm import SHARES, SIZES, _rows_of_nobody, affordable, offsets_of

_wrong = partial(wrong, "moe.scaled_grouped_mm")


def codes(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Random 8-bit numbers that use the dtype's range: of deviation 32, which a scale of `1 / 32` takes back."""
    return normal(generator, *shape, scale=32).to(dtype)


def _near_one(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers between a half and one and a half, in float64: none of them is one of float32."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


def _build(
    generator: torch.Generator,
    rows: int = 24,
    inner: int = 8,
    columns: int = 6,
    groups: int = 4,
    load: str = "random",
    owned: float = 1.0,
    scales: str = "row",
    stored: str = "KN",
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
    x_scales: str | None = None,
    x_dtype: torch.dtype = torch.float8_e4m3fn,
    out_dtype: str = "of the run",
) -> Arguments:
    shapes = {"row": (columns,), "row of one": (1, columns), "column": (inner, 1), "block": in_blocks(inner, columns)}
    weight = codes(generator, groups, inner, columns, dtype=dtype)
    x: Arguments = {"x": normal(generator, rows, inner)}
    if x_scales is not None:
        blocks = 1 if x_scales == "row" else in_blocks(inner)[0]
        x = {"x": codes(generator, rows, inner, dtype=x_dtype)}
        x["x_scale"] = (_near_one(generator, rows, blocks) / 32).to(scale_dtype)
    scale = _near_one(generator, groups, *shapes[scales]) / 32 * max(inner, 1) ** -0.5
    if x_scales is not None or out_dtype != "of the run":
        # A result in the dtype of the run is in float64 where that is the truth.
        x["out_dtype"] = _OUT_DTYPES[out_dtype]
    return {
        **x,
        "weight": weight if stored == "KN" else weight.mT.contiguous().mT,
        "scale": scale.to(scale_dtype),
        "offsets": offsets_of(generator, rows, groups, load, owned),
    }


_OUT_DTYPES = {"of the run": torch.float64, "none": None, "float32": torch.float32}


def _scaled_allowed(values: Mapping[str, Any]) -> bool:
    return affordable(values) and (values["x_scales"] is not None or values["x_dtype"] is torch.float8_e4m3fn)


def _scaled_rows_of_nobody(arguments: Arguments) -> Mapping[str, Tensor]:
    return _rows_of_nobody(arguments, *(name for name in ("x", "x_scale") if name in arguments))


# fmt: off
SCALED_GROUPED_MM = CaseTable(
    op="moe.scaled_grouped_mm",
    build=_build,
    cases=(
        case("small"),
        case("no rows", rows=0),
        case("one row", rows=1),
        case("63 rows, odd sizes", rows=63, inner=33, columns=17, groups=5),
        case("small blocks", scales="block"),
        case("one row, blocks", rows=1, inner=130, columns=129, scales="block"),
        case("63 rows, blocks that end early", rows=63, inner=200, columns=136, groups=3, scales="block"),
        case("blocks of matrices stored as NK", rows=17, inner=144, columns=272, groups=3, scales="block", stored="NK"),
        case("matrices stored as NK", inner=33, columns=17, stored="NK"),
        case("scales of input channels", inner=33, columns=17, scales="column"),
        case("e5m2", dtype=torch.float8_e5m2),
        case("8-bit x", x_scales="row", rows=40, owned=0.675),
        case("8-bit x, square blocks of matrices stored as NK", x_scales="block", inner=144, columns=136,
            scales="block", stored="NK"),
        case("e5m2 x", x_scales="row", dtype=torch.float8_e5m2, x_dtype=torch.float8_e5m2),
        case("one group", groups=1),
        case("more groups than rows", rows=5, groups=16),
        case("rows of nobody", rows=40, owned=0.675),
        case("every row of nobody", owned=0.0, scales="block"),
        case("one column", columns=1),
        case("inner size one", inner=1),
        case("granite-3.1-1b-a400m", rows=504, inner=512, columns=1024, groups=32, scales="block", model=True),
        case("mixtral-8x7b", rows=2048, inner=4096, columns=28672, groups=8, stored="NK", model=True, large=True),
        case("deepseek-v3 of one rank", rows=4096, inner=7168, columns=4096, groups=32, scales="block", stored="NK",
            model=True, large=True),
    ),
    wrong=(
        _wrong("one dimension too many", r"x must be \[rows, K\].*got \[1, 24, 8\]", x=lambda t: t[None]),
        _wrong("weights of floats", r"weight must be float8_e4m3fn or float8_e5m2; got torch\.float32: quantise it",
            weight=Tensor.float),
        _wrong("8-bit x without a scale", r"x must be float64.*with an x_scale; got torch\.float8_e4m3fn without one",
            x=lambda t: t.to(torch.float8_e4m3fn)),
        _wrong("floating x with a scale",
            r"x_scale is for an x of float8_e4m3fn.*got x of torch\.float32: leave x_scale out",
            x_scale=lambda _: torch.ones(24, 1)),
        _wrong("offsets of int64", r"offsets must be int32 of shape \[4\].*got torch\.int64 \[4\]",
            offsets=Tensor.long),
        _wrong("offsets of another number of experts",
            r"offsets must be int32 of shape \[4\].*got torch\.int32 \[3\]", offsets=lambda t: t[1:]),
        _wrong("a scale for each expert",
            r"scale must be float32 or float64 of shape \[4, 6\], .*; got torch\.float32 \[4\]",
            scale=lambda t: t[:, 0]),
        _wrong("scales of bfloat16", r"scale must be float32 or float64 of shape .*; got torch\.bfloat16 \[4, 6\]",
            scale=Tensor.bfloat16),
        _wrong("scales of x for other rows",
            r"x_scale must be float32 or float64 of shape \[24, 1\]; got torch\.float32 \[23, 1\]",
            x=lambda t: t.to(torch.float8_e5m2), x_scale=lambda _: torch.ones(23, 1)),
        _wrong("an 8-bit result", r"out_dtype must be float64.*or None; got torch\.float8_e4m3fn",
            out_dtype=lambda _: torch.float8_e4m3fn),
        _wrong("two devices", "x is on cpu, but weight on meta: all must be on one device",
            weight=lambda t: t.to("meta")),
        _wrong("weights that want a gradient",
            r"weight is quantised .* got requires_grad=True: call requires_grad_\(False\)",
            weight=lambda t: t.detach().requires_grad_()),
    ),
    gradients=("x",),
    padding=_scaled_rows_of_nobody,
    reduction=lambda arguments: max(*arguments["x"].shape, arguments["weight"].shape[2]),
    rare=(torch.float64,),
    domain=Domain(
        sizes=SIZES,
        options={
            **SHARES,
            "scales": ("row", "row of one", "column", "block"),
            "stored": ("KN", "NK"),
            "dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
            "scale_dtype": (torch.float32, torch.float64),
            "x_scales": (None, "row", "block"),
            "x_dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
            "out_dtype": tuple(_OUT_DTYPES),
        },
        sized=("scales", "x_scales", "stored"),
        allowed=_scaled_allowed,
    ),
    kept=frozenset({"scale", "x_scale"}),
)
# fmt: on
