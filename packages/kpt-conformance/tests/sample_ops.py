"""Ops of every kind that the contract allows, their kernels and tables: what they mutate, lists, results, seeds."""

from collections.abc import Callable

import torch
from torch import Tensor

from kpt_core import Call, op
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain, Sizes

CASES = (Case(name="small"), Case(name="one row", sizes={"rows": 1}), Case(name="63 rows", sizes={"rows": 63}))


@op("sample.write_rows", mutates=("cache",))
def write_rows(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Write `rows` into `cache` at `places`, none of them twice; gives what was there."""
    before = cache.index_select(0, places)
    cache.index_copy_(0, places, rows)
    return before


def write_rows_forward(call: Call) -> Tensor:
    before = torch.stack([call.cache[place] for place in call.places.tolist()])
    for row, place in enumerate(call.places.tolist()):
        call.cache[place] = call.rows[row]
    return before


def _build_write_rows(generator: torch.Generator, rows: int = 5) -> Arguments:
    return {
        "cache": torch.randn(2 * rows, 3, generator=generator, dtype=torch.float64),
        "rows": torch.randn(rows, 3, generator=generator, dtype=torch.float64),
        "places": torch.randperm(2 * rows, generator=generator)[:rows],
    }


@op("sample.add_rows", mutates=("cache",))
def add_rows(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Add `rows` to `cache` at `places`, none of them twice; gives what is there then."""
    cache.index_add_(0, places, rows)
    return cache.index_select(0, places)


def add_rows_forward(call: Call) -> Tensor:
    for row, place in enumerate(call.places.tolist()):
        call.cache[place] += call.rows[row]
    return torch.stack([call.cache[place] for place in call.places.tolist()])


def _largest(call: Call) -> tuple[Tensor, Tensor]:
    return torch.empty_like(call.parts[0]), torch.empty_like(call.parts[0], dtype=torch.int64)


@op("sample.largest", fake=_largest, saves="results")
def largest(parts: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The largest along the first dimension in each place, times `scale`, and which one it is."""
    values, index = parts.max(0)
    return values * scale, index


def largest_forward(call: Call) -> tuple[Tensor, Tensor]:
    values, index = call.parts[0].clone(), torch.zeros_like(call.parts[0], dtype=torch.int64)
    for place, part in enumerate(call.parts[1:], 1):
        larger = (part > values) | (part.isnan() & ~values.isnan())
        values, index = torch.where(larger, part, values), torch.where(larger, place, index)
    return values * call.scale, index


def largest_backward(call: Call, saved: tuple[Tensor, Tensor], grad: Tensor, _: None) -> dict[str, Tensor]:
    places = range(len(call.parts))
    return {"parts": torch.stack([torch.where(saved[1] == place, grad * call.scale, 0) for place in places])}


def _build_largest(generator: torch.Generator, rows: int = 5, sorted: bool = False) -> Arguments:
    # A few eighths apart, so that no two are alike in any dtype.
    order = torch.stack([torch.randperm(3, generator=generator) for _ in range(rows * 4)], 1).view(3, rows, 4)
    order = order.sort(0).values if sorted else order
    return {"parts": order.double() / 8 - 1, "scale": 0.5}


def _kept(x: Tensor, rate: float, seed: int, offset: int) -> Tensor:
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    return (place * 7919 + seed * 104729 + offset) % 1000 >= rate * 1000


@op("sample.dropout", random=True)
def dropout(x: Tensor, *, rate: float = 0.25, seed: int = 0, offset: int = 0) -> Tensor:
    """Zero some elements of `x`, those that seed and offset say."""
    return torch.where(_kept(x, rate, seed, offset), x, 0)


def dropout_forward(call: Call) -> Tensor:
    return call.x.masked_fill(~_kept(call.x, call.rate, call.seed, call.offset), 0)


def dropout_backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    return {"x": grad.masked_fill(~_kept(call.x, call.rate, call.seed, call.offset), 0)}


def _build_dropout(generator: torch.Generator, rows: int = 5, rate: float = 0.25) -> Arguments:
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "rate": rate, "seed": 3, "offset": 11}


@op("sample.divide")
def divide(x: Tensor, *, by: float = 0.7) -> Tensor:
    """`x / by` in the dtype of `x`, to the last bit."""
    return x / by


def divide_forward(call: Call) -> Tensor:
    return torch.cat([row / call.by for row in call.x.split(1)]) if len(call.x) else call.x.clone()


def _build_divide(generator: torch.Generator, rows: int = 5) -> Arguments:
    return {"x": torch.randn(rows, 6, generator=generator, dtype=torch.float64), "by": 0.7}


FLOAT8 = torch.float8_e4m3fn


def _codes_and_scales(call: Call) -> tuple[Tensor, Tensor]:
    rows, columns = call.x.shape
    return call.x.new_empty(rows, columns, dtype=FLOAT8), call.x.new_empty(
        rows, -(-columns // call.block), dtype=torch.float32
    )


@op("sample.quantise_rows", fake=_codes_and_scales)
def quantise_rows(x: Tensor, *, block: int = 16, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Float8 codes of `x` and what each block of a row is divided by, so that its largest is float8's."""
    blocks = -(-x.shape[1] // block)
    parts = torch.nn.functional.pad(x.float(), (0, blocks * block - x.shape[1])).view(len(x), blocks, block)
    scale = parts.abs().amax(-1) / torch.finfo(FLOAT8).max
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (parts / scale.unsqueeze(-1)).clamp(-torch.finfo(FLOAT8).max, torch.finfo(FLOAT8).max).to(FLOAT8)
    return codes.view(len(x), blocks * block)[:, : x.shape[1]].contiguous(), scale


def quantise_rows_forward(call: Call, divided: Callable[[Tensor, Tensor], Tensor] = torch.div) -> tuple[Tensor, Tensor]:
    codes, scales = _codes_and_scales(call)
    largest = torch.finfo(FLOAT8).max
    for place, part in enumerate(call.x.float().split(call.block, dim=1)):
        scale = part.abs().amax(1) / largest
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if call.power_of_two else scale
        scales[:, place] = scale.masked_fill(scale == 0, 1.0)
        start = place * call.block
        quotient = divided(part, scales[:, place, None])
        codes[:, start : start + call.block] = quotient.clamp(-largest, largest).to(FLOAT8)
    return codes, scales


def _build_quantise_rows(
    generator: torch.Generator, rows: int = 5, columns: int = 40, block: int = 16, power_of_two: bool = False
) -> Arguments:
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return {"x": x, "block": block, "power_of_two": power_of_two}


#: Forward and backward, and the table, by the op's name.
SAMPLES = {
    table.op: (functions, table)
    for functions, table in (
        ((divide_forward,), CaseTable(op="sample.divide", build=_build_divide, cases=CASES, exact=True)),
        (
            (quantise_rows_forward,),
            CaseTable(
                op="sample.quantise_rows",
                build=_build_quantise_rows,
                cases=(*CASES, Case(name="no rows", sizes={"rows": 0})),
                exact=True,
                domain=Domain(
                    sizes={"rows": Sizes(most=65), "columns": Sizes(least=1, most=129)},
                    options={"block": (16, 1, 128), "power_of_two": (False, True)},
                ),
            ),
        ),
        ((write_rows_forward,), CaseTable(op="sample.write_rows", build=_build_write_rows, cases=CASES)),
        ((add_rows_forward,), CaseTable(op="sample.add_rows", build=_build_write_rows, cases=CASES)),
        (
            (largest_forward, largest_backward),
            CaseTable(
                op="sample.largest",
                build=_build_largest,
                cases=(*CASES, Case(name="the last of all", sizes={"sorted": True})),
                gradients=("parts",),
            ),
        ),
        (
            (dropout_forward, dropout_backward),
            CaseTable(
                op="sample.dropout",
                build=_build_dropout,
                cases=(*CASES, Case(name="nothing lost", sizes={"rate": 0.0})),
                gradients=("x",),
            ),
        ),
    )
}
