"""An op with scales that are float32 whatever the dtype of the rest, and its table, which no package ships."""

import torch
from torch import Tensor

from kpt_core import Call, op
from kpt_optimize.cases import Arguments, Case, CaseTable


def _saves(call: Call) -> tuple[Tensor]:
    """The rows, scaled."""
    wide = torch.float64 if call.x.dtype is torch.float64 else call.x_scale.dtype
    return (call.x.to(wide) * call.x_scale.unsqueeze(1),)


@op("sample.scaled_mm", saves=_saves)
def scaled_mm(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Multiply `x` `[rows, K]` by `weight` `[K, columns]`, rows scaled by `x_scale`, columns by `weight_scale`."""
    return ((x @ weight).to(x_scale.dtype) * x_scale.unsqueeze(1) * weight_scale).to(x.dtype)


def _build(generator: torch.Generator, rows: int = 6, inner: int = 8, columns: int = 6) -> Arguments:
    return {
        "x": torch.randn(rows, inner, generator=generator, dtype=torch.float64),
        "weight": torch.randn(inner, columns, generator=generator, dtype=torch.float64),
        "x_scale": torch.rand(rows, generator=generator) + 0.5,
        "weight_scale": torch.rand(columns, generator=generator) + 0.5,
    }


SCALED_MM = CaseTable(
    op="sample.scaled_mm",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0}),
        Case(name="one row", sizes={"rows": 1}),
        Case(name="63 rows", sizes={"rows": 63, "inner": 129, "columns": 17}),
    ),
    gradients=("x", "weight"),
    reduction=lambda arguments: max(*arguments["x"].shape, arguments["weight"].shape[1]),
)
