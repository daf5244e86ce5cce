"""Faults in the gradient of the experts' weights as an op of its own."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import honest
import kpt_core

from .grouped_mm import end_of, past
from .mutant import Mutant

MUTANTS: list[Mutant] = []
_reference = kpt_core.get_op("moe.grouped_mm_wgrad").reference


def fault(name: str, found_by: str, at: Any = lambda trial: False) -> Callable[[Callable[..., Tensor]], None]:
    """Enter a mutant: the decorated function computes the result, and autograd the gradients."""

    def enter(body: Callable[..., Tensor]) -> None:
        def make() -> tuple[honest.Function]:
            return (lambda call: body(call.x, call.grad, call.offsets),)

        MUTANTS.append(Mutant(name, "moe.grouped_mm_wgrad", found_by, make, {"differentiable": True}, at))

    return enter


@fault("experts without rows have the last one's product", "values")
def _(x, grad, offsets):
    out = _reference(x, grad, offsets)
    ends = [0, *offsets.tolist()]
    empty = torch.tensor([a == b for a, b in itertools.pairwise(ends)], dtype=torch.bool)
    return torch.where(empty.view(-1, 1, 1), out.roll(1, 0), out)


@fault("rows of nobody count for the last expert", "values")
def _(x, grad, offsets):
    ends = offsets.clone()
    ends[-1:] = x.shape[0]
    return _reference(x, grad, ends)


@fault("rows of nobody are multiplied by zero", "padding")
def _(x, grad, offsets):
    inside = (torch.arange(x.shape[0]) < end_of(offsets)).unsqueeze(1)
    ends = offsets.clone()
    ends[-1:] = x.shape[0]
    return _reference(x * inside, grad * inside, ends)


@fault("an expert's rows past 128 are not summed", "values", past(rows=128))
def _(x, grad, offsets):
    starts = torch.cat((offsets.new_zeros(1), offsets[:-1]))
    place = torch.arange(x.shape[0]).unsqueeze(1)
    kept = ((place >= starts) & (place < torch.minimum(offsets, starts + 128))).any(1, keepdim=True)
    return _reference(torch.where(kept, x, 0), grad, offsets)


@fault("groups past the thirty-second are zero", "values", past(groups=32))
def _(x, grad, offsets):
    out = _reference(x, grad, offsets)
    return torch.where(torch.arange(len(offsets)).view(-1, 1, 1) < 32, out, 0)


@fault(
    "partial sums of eight rows are kept in the dtype",
    "values",
    lambda t: t.case.name == "whole tiles" and t.dtype is torch.bfloat16,
)
def _(x, grad, offsets):
    out = _reference(x, grad, offsets) * 0
    for first in range(0, x.shape[0], 8):
        own = (torch.arange(x.shape[0]) // 8 == first // 8).unsqueeze(1)
        out = out + _reference(torch.where(own, x, 0), grad, offsets)
    return out


@fault("the gradient of grad is cut", "values")
def _(x, grad, offsets):
    return _reference(x, grad.detach() + 0 * grad, offsets)


@fault("the result is transposed in memory", "fake_result")
def _(x, grad, offsets):
    return _reference(x, grad, offsets).mT.contiguous().mT
