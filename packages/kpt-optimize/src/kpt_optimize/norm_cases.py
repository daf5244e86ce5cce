"""The case table of `norm.rms`."""

import torch

from kpt_core import InputError

from .cases import Arguments, Case, CaseTable, Domain, Sizes, WrongInput


def _build(
    generator: torch.Generator, rows: int = 5, columns: int = 40, heads: int = 0, eps: float = 1e-6
) -> Arguments:
    shape = (rows, heads, columns) if heads else (rows, columns)
    x, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, (columns,)))
    return {"x": x, "weight": weight, "eps": eps}


def _wrong(name: str, message: str, **changed: object) -> WrongInput:
    return WrongInput(
        name=name, change=lambda arguments: arguments | changed, message=f"norm.rms: {message}", error=InputError
    )


NORM = CaseTable(
    op="norm.rms",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no rows", sizes={"rows": 0}),
        Case(
            name="one number, of which the gradient is small without an eps",
            sizes={"rows": 1, "columns": 1, "eps": 0.5},
        ),
        Case(name="a large eps", sizes={"columns": 63, "eps": 2.0}),
        Case(name="heads", sizes={"rows": 2, "heads": 3, "columns": 64}),
        Case(name="many rows", sizes={"rows": 130, "columns": 576}, model=True),
        Case(name="llama-3.1-8b", sizes={"rows": 2, "columns": 4096}, model=True),
    ),
    wrong=(
        _wrong("weight of another size", r"x must be .* equal N .*got \[5, 40\] and \[41\]", weight=torch.ones(41)),
        _wrong("a matrix of weights", r"x must be .*got \[5, 40\] and \[1, 40\]", weight=torch.ones(1, 40)),
        _wrong(
            "another dtype",
            "both must have one floating dtype; got torch.float32 and torch.float16: convert them",
            weight=torch.ones(40, dtype=torch.float16),
        ),
        _wrong("a negative eps", "eps must be at least 0; got -1.0", eps=-1.0),
    ),
    gradients=("x", "weight"),
    reduction=lambda arguments: max(int(arguments["weight"].shape[0]), arguments["x"].numel() // 4),
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "rows": Sizes(many=4_097, usual=(1, 4, 65, 641)),
            "columns": Sizes(least=1, many=5_120, usual=(64, 769, 2_880)),
        },
        options={"heads": (0, 3), "eps": (1e-6, 0.5)},
        families={"Qwen3, heads": {"rows": 1, "heads": 32, "columns": 128}, "SmolLM2": {"rows": 8, "columns": 576}},
        allowed=lambda values: (
            values.get("rows", 1) * max(values.get("heads", 0), 1) * values.get("columns", 1) <= 1 << 21
        ),
    ),
)

TABLES = (NORM,)
