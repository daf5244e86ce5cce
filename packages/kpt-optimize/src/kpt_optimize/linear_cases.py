"""The case table of `linear.dense`."""

import torch

from kpt_core import InputError

from .cases import Arguments, Case, CaseTable, Domain, Sizes, WrongInput


def _build(
    generator: torch.Generator, rows: int = 5, inner: int = 40, columns: int = 6, biased: bool = False, batch: int = 0
) -> Arguments:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    arguments: Arguments = {
        "x": normal(*(batch,) * (batch > 0), rows, inner),
        "weight": normal(columns, inner) / inner**0.5,
    }
    return arguments | ({"bias": normal(columns)} if biased else {})


def _wrong(name: str, message: str, **changed: torch.Tensor) -> WrongInput:
    return WrongInput(
        name=name, change=lambda arguments: arguments | changed, message=f"linear.dense: {message}", error=InputError
    )


LINEAR = CaseTable(
    op="linear.dense",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0}),
        Case(name="one row", sizes={"rows": 1, "biased": True}),
        Case(name="16 rows, odd sizes", sizes={"rows": 16, "inner": 33, "columns": 17, "biased": True}),
        Case(name="17 rows, odd sizes", sizes={"rows": 17, "inner": 33, "columns": 17}),
        Case(name="three dimensions", sizes={"rows": 2, "batch": 3, "biased": True}),
        # So many that one rounding more than there has to be shows in the mean error.
        Case(name="many results", sizes={"rows": 8, "inner": 256, "columns": 4096, "biased": True}, model=True),
        Case(name="smollm2", sizes={"rows": 1, "inner": 576, "columns": 1536}, model=True),
        Case(name="llama-3.1-8b", sizes={"rows": 1, "inner": 4096, "columns": 14336}, model=True, large=True),
    ),
    wrong=(
        _wrong("x of one dimension", r"x must be \[\.\.\., M, K\].*got \[40\] and \[6, 40\]", x=torch.ones(40)),
        _wrong(
            "weight of other inputs",
            r"x must be .* with equal K; got \[5, 40\] and \[6, 41\]",
            weight=torch.ones(6, 41),
        ),
        _wrong("bias of another size", r"bias must be \[6\], one number a column; got \[5\]", bias=torch.ones(5)),
        _wrong(
            "another dtype",
            "all must have one floating dtype; got torch.float32, torch.float16: convert them",
            weight=torch.ones(6, 40, dtype=torch.float16),
        ),
    ),
    gradients=("x", "weight", "bias"),
    reduction=lambda arguments: max(*arguments["x"].shape, int(arguments["weight"].shape[0])),
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "rows": Sizes(many=70_001, usual=(1, 4, 16, 65, 641)),
            "inner": Sizes(many=4_097, usual=(1_153, 2_880)),
            "columns": Sizes(many=2_880, usual=(130, 769)),
        },
        options={"biased": (False, True), "batch": (0, 2)},
        families={
            "SmolLM2, a step": {"rows": 1, "inner": 1_536, "columns": 576},
            "Qwen2.5, a step of eight": {"rows": 8, "inner": 896, "columns": 1_152, "biased": True},
        },
        allowed=lambda values: (
            values.get("rows", 1) * max(values.get("batch", 1), 1) * (values.get("inner", 1) + values.get("columns", 1))
            + values.get("inner", 1) * values.get("columns", 1)
            <= 3_500_000
        ),
    ),
)

TABLES = (LINEAR,)
