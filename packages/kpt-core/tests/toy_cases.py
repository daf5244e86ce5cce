"""Arguments of the toy ops, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import toy_ops

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    sizes: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    op: str
    build: Callable[..., Arguments]
    cases: tuple[Case, ...]
    gradients: tuple[str, ...] = ()

    def arguments(self, case: Case, dtype: torch.dtype = torch.float32) -> Arguments:
        made = self.build(torch.Generator().manual_seed(0), **case.sizes)
        return {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in made.items()}


def _numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _append(generator: torch.Generator, new: int = 3, position: int = 2) -> Arguments:
    caches = {name: _numbers(generator, new + position + 1, 5) for name in ("keys", "values")}
    return {**caches, "new": _numbers(generator, new, 5), "position": position}


def _clear(generator: torch.Generator, rows: int = 3, some: bool = False) -> Arguments:
    cache = _numbers(generator, rows, 5)
    return {"cache": cache, "keep": (torch.arange(rows) % 2).double() if some else None}


def _best(generator: torch.Generator, rows: int = 3, count: int = 2) -> Arguments:
    # No two are alike, in any dtype.
    order = torch.rand(rows, 16, generator=generator).argsort(1)
    return {"x": order.double() - 7, "count": count}


def _attend(
    generator: torch.Generator, rows: int = 3, position: int = 2, cached: bool = True, **more: object
) -> Arguments:
    q, k = _numbers(generator, rows, 5), _numbers(generator, rows, 5)
    cache = _numbers(generator, position + rows + 1, 5) if cached else None
    return {
        "q": q,
        "k": k,
        "cache": cache,
        "position": position,
        "seed": 3,
        "offset": 1,
        "p": 0.25,
        "lse": False,
        **more,
    }


def _dropout(generator: torch.Generator, rows: int = 3, seed: int = 7, offset: int = 0) -> Arguments:
    return {"x": _numbers(generator, rows, 5), "seed": seed, "offset": offset, "p": 0.25}


def _layer(generator: torch.Generator, rows: int = 3, bias: bool = True) -> Arguments:
    x, weight = _numbers(generator, rows, 5), _numbers(generator, 5, 4)
    return {"x": x, "weight": weight, "bias": _numbers(generator, 4) if bias else None}


def _cases(**rows: dict[str, object]) -> tuple[Case, ...]:
    return tuple(Case(name=name.replace("_", " "), sizes=sizes) for name, sizes in rows.items())


TABLES = {
    table.op: table
    for table in (
        Table(
            op=toy_ops.append.name,
            build=_append,
            cases=_cases(few={}, none={"new": 0}, one={"new": 1}, many={"new": 63, "position": 9}),
        ),
        Table(op=toy_ops.clear.name, build=_clear, cases=_cases(all={}, none={"rows": 0}, some={"some": True})),
        Table(
            op=toy_ops.best.name,
            build=_best,
            cases=_cases(few={}, none={"rows": 0}, one={"rows": 1, "count": 1}, many={"rows": 63}),
            gradients=("x",),
        ),
        Table(
            op=toy_ops.attend.name,
            build=_attend,
            cases=_cases(few={}, none={"rows": 0}, with_lse={"lse": True}, no_cache={"cached": False, "lse": True}),
            gradients=("q", "k"),
        ),
        Table(
            op=toy_ops.dropout.name,
            build=_dropout,
            cases=_cases(few={}, none={"rows": 0}, many={"rows": 63, "seed": 1, "offset": 64}),
            gradients=("x",),
        ),
        Table(
            op=toy_ops.layer.name,
            build=_layer,
            cases=_cases(few={}, none={"rows": 0}, one={"rows": 1}, many={"rows": 65}, no_bias={"bias": False}),
            gradients=("x", "weight", "bias"),
        ),
    )
}
