"""The case tables of `moe.grouped_mm` and `moe.grouped_mm_wgrad`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kpt_optimize.cases import Arguments, CaseTable, Domain, Sizes, WrongInput

from .common import MANY, MORE, WIDE, WIDER, case, normal, wrong

#: How rows are shared out among groups, and which part of them belongs to any: see `offsets_of`. Where none does there
#: is nothing to do, which a named case tries.
SHARES: dict[str, tuple[Any, ...]] = {"load": ("random", "one", "skewed"), "owned": (1.0, 0.675)}


def offsets_of(generator: torch.Generator, rows: int, groups: int, load: str, owned: float) -> Tensor:
    """`[groups]` int32 end rows.

    Args:
        generator: what they are drawn from.
        rows: of all groups, and of nobody.
        groups: their number.
        load: `random` leaves some groups empty, `one` all but one, `skewed` gives half of what is left to each in turn.
        owned: the part of the rows that belongs to a group; the last rows belong to nobody.
    """
    taken = int(rows * owned)
    if load == "one":
        ends = torch.where(torch.arange(groups) < groups // 2, 0, taken)
    elif load == "skewed":
        ends = taken - (taken * 0.5 ** torch.arange(1, groups + 1)).long()
    else:
        ends = torch.randint(0, taken + 1, (max(groups - 1, 0),), generator=generator).sort().values
    return torch.cat((ends[: max(groups - 1, 0)], torch.tensor([taken])))[:groups].int()


def _build_grouped_mm(
    generator: torch.Generator,
    rows: int = 24,
    inner: int = 8,
    columns: int = 6,
    groups: int = 4,
    load: str = "random",
    owned: float = 1.0,
    stored: str = "KN",
) -> Arguments:
    x = normal(generator, rows, inner)
    weight = normal(generator, groups, inner, columns, scale=max(inner, 1) ** -0.5)
    return {
        "x": x,
        "weight": weight if stored == "KN" else weight.mT.contiguous().mT,
        "offsets": offsets_of(generator, rows, groups, load, owned),
    }


def _build_wgrad(
    generator: torch.Generator,
    rows: int = 24,
    inner: int = 8,
    columns: int = 6,
    groups: int = 4,
    load: str = "random",
    owned: float = 1.0,
) -> Arguments:
    return {
        "x": normal(generator, rows, inner),
        "grad": normal(generator, rows, columns),
        "offsets": offsets_of(generator, rows, groups, load, owned),
    }


def _rows_of_nobody(arguments: Arguments, *names: str) -> Mapping[str, Tensor]:
    rows = arguments["x"].shape[0]
    end = arguments["offsets"][-1] if arguments["offsets"].shape[0] else 0
    past = (torch.arange(rows, device=arguments["x"].device) >= end).unsqueeze(1)
    return dict.fromkeys(names, past)


_GROUPED_CASES = (
    case("small"),
    case("no rows", rows=0),
    case("one row", rows=1),
    case("63 rows, odd sizes", rows=63, inner=33, columns=17, groups=5),
    case("one group", groups=1),
    case("whole tiles", rows=128, inner=64, columns=64, groups=1),
    case("more groups than rows", rows=5, groups=16),
    case("rows of nobody", rows=40, owned=0.675),
    case("every row of nobody", owned=0.0),
    case("one column", columns=1),
    case("inner size one", inner=1),
    case("granite-3.1-1b-a400m", rows=504, inner=512, columns=1024, groups=32, model=True),
    case("mixtral-8x7b", rows=2048, inner=4096, columns=28672, groups=8, model=True, large=True),
    case("qwen3-30b-a3b", rows=8192, inner=2048, columns=1536, groups=128, model=True, large=True),
)


#: Of the products of groups.
SIZES = {
    "rows": Sizes(many=MANY, usual=(1, 8, 65)),
    "inner": Sizes(many=7_168, usual=(WIDE, WIDER)),
    "columns": Sizes(many=WIDE, usual=(130, 520)),
    "groups": Sizes(1, many=MORE, usual=(8, 32)),
}


def affordable(values: Mapping[str, Any]) -> bool:
    """Return whether matrices and rows have no more than millions of numbers."""
    rows, inner, columns, groups = (values.get(name, 1) for name in ("rows", "inner", "columns", "groups"))
    return bool(rows * (inner + columns) + groups * inner * columns <= 3_500_000)


def _wrong_groups(op: str, other: str) -> tuple[WrongInput, ...]:
    def changed(to: Callable[[Any], Any]) -> dict[str, Any]:
        return {other: to}

    # fmt: off
    return (
        wrong(op, "offsets of int64", r"offsets must be int32 of shape \[4\].*got torch\.int64 \[4\]",
            offsets=Tensor.long),
        wrong(op, "two dtypes", rf"x and {other} must have one floating dtype.*got torch\.float32 and torch\.float64",
            **changed(Tensor.double)),
        wrong(op, "integers", rf"x and {other} must have one floating dtype.*got torch\.int32", x=Tensor.int,
            **changed(Tensor.int)),
        wrong(op, "two devices", f"x, {other} and offsets must be on one device; got cpu, meta and cpu",
            **changed(lambda t: t.to("meta"))),
        wrong(op, "one dimension too many", r"x must be \[rows, K\].*got \[1, 24, 8\]", x=lambda t: t[None]),
    )
    # fmt: on


# fmt: off
GROUPED_MM = CaseTable(
    op="moe.grouped_mm",
    build=_build_grouped_mm,
    cases=_GROUPED_CASES,
    wrong=(
        *_wrong_groups("moe.grouped_mm", "weight"),
        wrong("moe.grouped_mm", "offsets of another number of experts",
            r"offsets must be int32 of shape \[4\].*got torch\.int32 \[3\]", offsets=lambda t: t[1:]),
    ),
    gradients=("x", "weight"),
    padding=lambda arguments: _rows_of_nobody(arguments, "x"),
    reduction=lambda arguments: max(*arguments["x"].shape, arguments["weight"].shape[2]),
    rare=(torch.float64,),
    domain=Domain(sizes=SIZES, options={**SHARES, "stored": ("KN", "NK")}, sized=("stored",), allowed=affordable),
)

GROUPED_MM_WGRAD = CaseTable(
    op="moe.grouped_mm_wgrad",
    build=_build_wgrad,
    cases=_GROUPED_CASES,
    wrong=_wrong_groups("moe.grouped_mm_wgrad", "grad"),
    gradients=("x", "grad"),
    padding=lambda arguments: _rows_of_nobody(arguments, "x", "grad"),
    reduction=lambda arguments: max(*arguments["x"].shape, arguments["grad"].shape[1]),
    rare=(torch.float64,),
    domain=Domain(sizes=SIZES, options=SHARES, allowed=affordable),
)
# fmt: on
