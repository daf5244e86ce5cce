"""Faults in ops that mutate, draw at random, take lists or give several results: the suite's own sample ops."""

from typing import Any

import torch
from torch import Tensor

import kpt_core
import sample_ops
from kpt_optimize.cases import Case, CaseTable

from .mutant import Functions, Mutant

MUTANTS: list[Mutant] = []


def _enter(op: str, name: str, found_by: str, *functions: Any) -> None:
    """Enter a mutant of an op, right in what is not given."""
    right = sample_ops.SAMPLES[op][0]

    def make() -> Functions:
        return tuple(given or function for given, function in zip([*functions, None], right, strict=False))

    MUTANTS.append(Mutant(name, op, found_by, make))


# An op that mutates.


def _writes_one_row_more(call):
    before = sample_ops.write_rows_forward(call)
    if len(call.places) and int(call.places[-1]) + 1 < len(call.cache):
        call.cache[int(call.places[-1]) + 1] = call.rows[-1]
    return before


def _forgets_the_last_row(call):
    return torch.cat(
        (
            sample_ops.write_rows_forward(call._replace(places=call.places[:-1], rows=call.rows[:-1])),
            call.cache[call.places[-1:]],
        )
    )


def _writes_into_a_copy(call):
    return sample_ops.write_rows_forward(call._replace(cache=call.cache.clone()))


def _gives_what_is_there_now(call):
    sample_ops.write_rows_forward(call)
    return call.cache.index_select(0, call.places)


def _gives_a_view(call):
    before = sample_ops.write_rows_forward(call)
    call.rows.copy_(before)
    return call.rows


def _clears_what_it_wrote(call):
    before = sample_ops.write_rows_forward(call)
    call.rows.zero_()
    return before


def _sorts_places(call):
    return sample_ops.write_rows_forward(call._replace(places=call.places.sort().values))


for _name, _check, _forward in (
    ("it writes one row too many", "values", _writes_one_row_more),
    ("it forgets to write the last row", "values", _forgets_the_last_row),
    ("it writes into a copy", "values", _writes_into_a_copy),
    ("it gives what is there afterwards", "values", _gives_what_is_there_now),
    ("the result is an argument", "no_aliasing", _gives_a_view),
    ("it clears the rows that it wrote", "inputs_unchanged", _clears_what_it_wrote),
    ("it writes rows in the order of their places", "values", _sorts_places),
):
    _enter("sample.write_rows", _name, _check, _forward)


# An op that mutates, and whose second call changes more.


def _takes_it_for_a_repeat():
    last: list[Tensor] = []

    def forward(call):
        if last and torch.equal(last[0], call.cache):
            return last[1].clone()
        out = sample_ops.add_rows_forward(call)
        last[:] = call.cache.clone(), out.clone()
        return out

    return forward


def _rounds_every_second_call_otherwise():
    calls: list[int] = []

    def forward(call):
        calls.append(1)
        eps = torch.finfo(call.rows.dtype).eps if len(calls) % 2 else 0.0
        return sample_ops.add_rows_forward(call._replace(rows=call.rows * (1 + eps)))

    return forward


def _of_add_rows(name: str, found_by: str, make: Any) -> None:
    MUTANTS.append(Mutant(name, "sample.add_rows", found_by, lambda: (make(),), {"deterministic": True}))


_of_add_rows("a call that finds the state as it left it does nothing", "called_twice", _takes_it_for_a_repeat)
_of_add_rows("from one state it comes to two", "repeatable", _rounds_every_second_call_otherwise)


# An op that takes a list and gives two results.


def _swaps_two(call):
    parts = list(call.parts)
    parts[:2] = reversed(parts[:2])
    return sample_ops.largest_forward(call._replace(parts=parts))


def _forgets_the_last_part(call):
    return sample_ops.largest_forward(call._replace(parts=list(call.parts)[:-1]))


def _sorts_the_list(call):
    call.parts.sort(key=lambda part: float(part.sum()))
    return sample_ops.largest_forward(call)


def _index_of_int32(call):
    values, index = sample_ops.largest_forward(call)
    return values, index.int()


def _dtypes_exchanged(call):
    values, index = sample_ops.largest_forward(call)
    return values.long(), index.to(values.dtype)


def _results_exchanged(call):
    return sample_ops.largest_forward(call)[::-1]


def _gradients_in_reverse(call, saved, grad, other):
    made = sample_ops.largest_backward(call, saved, grad, other)
    return {"parts": made["parts"][::-1]}


def _gradient_of_the_first_alone(call, saved, grad, other):
    first, *others = sample_ops.largest_backward(call, saved, grad, other)["parts"]
    return {"parts": [first, *map(torch.zeros_like, others)]}


for _name, _check, _functions in (
    ("it takes the second of a list for the first", "values", (_swaps_two,)),
    ("it forgets the last of a list", "values", (_forgets_the_last_part,)),
    ("it sorts the list that it is given", "inputs_unchanged", (_sorts_the_list,)),
    ("the index is of int32", "result_type", (_index_of_int32,)),
    ("two results have each other's dtype", "result_type", (_dtypes_exchanged,)),
    ("two results are exchanged", "result_type", (_results_exchanged,)),
    ("the gradients of a list come in reverse order", "values", (None, _gradients_in_reverse)),
    ("only the first of a list gets a gradient", "values", (None, _gradient_of_the_first_alone)),
):
    _enter("sample.largest", _name, _check, *_functions)


# An op that draws at random.


def _ignores_the_offset(call):
    return sample_ops.dropout_forward(call._replace(offset=0))


def _ignores_the_seed(call):
    return sample_ops.dropout_forward(call._replace(seed=0))


def _cuts_the_seed(call):
    return sample_ops.dropout_forward(call._replace(seed=call.seed & 0xFFFF))


def _reads_the_global_generator(call):
    return torch.where(torch.rand(call.x.shape) >= call.rate, call.x, 0)


def _seeds_the_global_generator(call):
    torch.manual_seed(call.seed + call.offset)
    return sample_ops.dropout_forward(call)


def _another_rate(call):
    return sample_ops.dropout_forward(call._replace(rate=call.rate * 0.9))


def _one_row_for_all(call):
    out = sample_ops.dropout_forward(call._replace(x=torch.ones_like(call.x)))
    return call.x * out[:1]


def _counts_calls():
    calls: list[int] = []

    def forward(call):
        calls.append(1)
        return sample_ops.dropout_forward(call._replace(offset=call.offset + len(calls) - 1))

    return forward


def _gradient_of_another_mask(call, saved, grad):
    return sample_ops.dropout_backward(call._replace(seed=call.seed + 1), saved, grad)


def _gradient_in_the_cotangent(call, saved, grad):
    return {"x": grad.mul_(sample_ops.dropout_backward(call, saved, torch.ones_like(grad))["x"])}


for _name, _check, _functions in (
    ("it ignores the offset", "values", (_ignores_the_offset,)),
    ("it ignores the seed", "values", (_ignores_the_seed,)),
    ("it reads the process's random numbers", "values", (_reads_the_global_generator,)),
    ("it seeds the process's random numbers", "process_state", (_seeds_the_global_generator,)),
    ("every row loses the same elements", "values", (_one_row_for_all,)),
    ("it loses fewer elements than it says", "statistics", (_another_rate,)),
    ("it counts its calls", "values", (_counts_calls(),)),
    ("its gradient draws anew", "values", (None, _gradient_of_another_mask)),
    ("its gradient is written into the cotangent", "inputs_unchanged", (None, _gradient_in_the_cotangent)),
    ("it keeps sixteen bits of the seed", "replayed", (_cuts_the_seed,)),
):
    _enter("sample.dropout", _name, _check, *_functions)


# An op that rounds to float8, to the last bit.


def _multiplies_by_the_reciprocal(call):
    return sample_ops.quantise_rows_forward(call, lambda part, scale: part * (1 / scale))


def _without_a_sign_of_zero(call):
    codes, scales = sample_ops.quantise_rows_forward(call)
    return torch.where(codes.float() == 0, 0, codes.float()).to(codes.dtype), scales


def _scales_an_ulp_off(call):
    codes, scales = sample_ops.quantise_rows_forward(call)
    return codes, scales.nextafter(torch.full_like(scales, float("inf")))


for _name, _check, _forward in (
    ("it multiplies by the reciprocal of the scale", "values", _multiplies_by_the_reciprocal),
    ("it multiplies by the reciprocal, which large numbers show", "magnitudes", _multiplies_by_the_reciprocal),
    ("it takes -0 for 0", "values", _without_a_sign_of_zero),
    ("it gives scales that are one ulp off", "values", _scales_an_ulp_off),
):
    _enter("sample.quantise_rows", _name, _check, _forward)


# An op whose gradient is what it is given.


@kpt_core.op("sample.raised")
def raised(x: Tensor) -> Tensor:
    """`x + 1`."""
    return x + 1


TABLE = CaseTable(
    op="sample.raised",
    build=lambda generator, rows=5: {"x": torch.randn(rows, 3, generator=generator, dtype=torch.float64)},
    cases=(Case(name="small"),),
    gradients=("x",),
)


def _of_raised(name: str, found_by: str, backward: Any) -> None:
    MUTANTS.append(Mutant(name, TABLE.op, found_by, lambda: (lambda call: call.x + 1, backward)))


_of_raised("its gradient is the cotangent", "no_aliasing", lambda call, saved, grad: {"x": grad})
_of_raised("its gradient is a view of the cotangent", "no_aliasing", lambda call, saved, grad: {"x": grad[:]})
