"""Faults in the gradients of the product, and in what it says to compilers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import honest

from .grouped_mm import as_if_contiguous, end_of, past, with_stride
from .mutant import Functions, Mutant, Parts, of_parts

MUTANTS: list[Mutant] = []


def fault(part: str, name: str, found_by: str, **settings: Any) -> Callable[[Callable[..., Tensor]], None]:
    """Enter a mutant: the decorated function is given the right gradient's function and its arguments."""

    def enter(body: Callable[..., Tensor]) -> None:
        def change(parts: Parts) -> Parts:
            right = getattr(parts, part)
            return replace(parts, **{part: lambda *arguments: body(right, *arguments)})

        MUTANTS.append(of_parts(name, found_by, change, **settings))

    return enter


def alone(name: str, found_by: str, **offer: Any) -> Callable[[Callable[[], Functions]], None]:
    """Enter a mutant that cannot be combined with others, made by the decorated function."""

    def enter(make: Callable[[], Functions]) -> None:
        # Compilers take seconds for each case, and this one shows both.
        MUTANTS.append(
            Mutant(name, "moe.grouped_mm", found_by, make, offer, lambda trial: trial.case.name == "inner size one")
        )

    return enter


@fault("for_x", "the gradient of x uses the next expert's weight", "values")
def _(right, grad, weight, offsets):
    return right(grad, weight.roll(1, 0), offsets)


@fault("for_x", "rows of a cotangent in slices are taken for dense ones", "cotangents")
def _(right, grad, weight, offsets):
    sliced = grad.stride(1) == 1 and grad.stride(0) > grad.shape[1]
    return right(with_stride(grad, 0, grad.shape[1]) if sliced else grad, weight, offsets)


@fault("for_x", "an aligned offset of a cotangent is left out", "cotangents")
def _(right, grad, weight, offsets):
    aligned = grad.storage_offset() * grad.element_size() % 16 == 0
    return right(grad.as_strided(grad.shape, grad.stride(), 0) if aligned else grad, weight, offsets)


@fault("for_x", "the gradient of x lacks the last expert", "values")
def _(right, grad, weight, offsets):
    out = right(grad, weight, offsets)
    if len(offsets) > 1:
        out[int(offsets[-2]) :] = 0
    return out


@fault("for_x", "the gradient of x takes a square matrix without transposing it", "values")
def _(right, grad, weight, offsets):
    return right(grad, weight.mT if weight.shape[1] == weight.shape[2] else weight, offsets)


@fault("for_weight", "the gradient of the weight lacks the last row", "values")
def _(right, x, grad, offsets):
    return right(x, grad, (offsets - 1).clamp(min=0))


@fault("for_weight", "the gradient of the weight sums 128 rows of an expert", "values", at=past(rows=128))
def _(right, x, grad, offsets):
    place = torch.arange(x.shape[0])
    starts = torch.cat((offsets.new_zeros(1), offsets[:-1])).long()
    of_expert = (place.unsqueeze(1) >= offsets).sum(1).clamp(max=max(len(offsets) - 1, 0))
    kept = place - starts[of_expert] < 128
    return right(x, grad * kept.unsqueeze(1), offsets)


@fault("for_weight", "the gradient of the weight is a mean over rows", "values")
def _(right, x, grad, offsets):
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).clamp(min=1)
    return (right(x, grad, offsets) / counts.view(-1, 1, 1)).to(x.dtype)


@fault("for_weight", "the gradient of the weight of an expert without rows is never written", "poisoned_outputs")
def _(right, x, grad, offsets):
    out, made = x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1]), right(x, grad, offsets)
    for expert, start, end in honest.ends_of(offsets):
        if end > start:
            out[expert] = made[expert]
    return out


@fault("for_x", "the cotangent is taken for contiguous", "cotangents")
def _(right, grad, weight, offsets):
    return right(as_if_contiguous(grad), weight, offsets)


@fault("for_weight", "a cotangent of one number everywhere is taken for zero", "cotangents")
def _(right, x, grad, offsets):
    return right(x, grad if any(grad.stride()) else torch.zeros_like(grad), offsets)


@fault("for_x", "backward changes the cotangent", "inputs_unchanged")
def _(right, grad, weight, offsets):
    out = right(grad, weight, offsets)
    grad.mul_(0.5)
    return out


@fault("for_weight", "backward changes the x that was kept", "inputs_unchanged")
def _(right, x, grad, offsets):
    out = right(x, grad, offsets)
    x.mul_(2)
    return out


@fault("for_x", "padding gets a gradient", "padding")
def _(right, grad, weight, offsets):
    out = right(grad, weight, offsets)
    out[end_of(offsets) :] = 1
    return out


@fault("for_weight", "the weight gets no gradient", "values")
def _(right, x, grad, offsets):
    return x.new_zeros(offsets.shape[0], x.shape[1], grad.shape[1])


@fault("for_x", "tiny cotangents give no gradient", "cotangents")
def _(right, grad, weight, offsets):
    return right(torch.where(grad.abs() < 1e-7, torch.zeros_like(grad), grad), weight, offsets)


@alone("it reads values, though compilers may look into it", "traced", differentiable=True, traceable=True)
def _():
    return (honest.grouped_mm_of()[0],)


@alone("sizes are fixed, though compilers may look into it", "traced", traceable=True)
def _():
    def grouped_mm(call):
        block = 1 << call.x.shape[0].bit_length()  # a plain number, of the size that is traced
        rows = torch.arange(block)[: call.x.shape[0]].unsqueeze(1)
        of_expert = (rows >= call.offsets).sum(1)
        inside = (of_expert < call.offsets.shape[0]).unsqueeze(1)
        weight = call.weight[of_expert.clamp(max=call.offsets.shape[0] - 1)]
        return (call.x.unsqueeze(1) @ weight).squeeze(1) * inside

    return (grouped_mm,)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return honest.product(x, weight, offsets)


class _Constant(_Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = (tensor.detach() for tensor in ctx.saved_tensors)
        return honest.product_for_x(grad, weight, offsets), honest.product_for_weight(x, grad, offsets), None


class _Cut(_Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        with torch.no_grad():
            return honest.product_for_x(grad, weight, offsets), honest.product_for_weight(x, grad, offsets), None


class _CutForX(_Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        for_x = honest.product_for_x(grad, weight, offsets).detach()
        return for_x, honest.product_for_weight(x, grad, offsets), None


class _Once(_Product):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        return honest.product_for_x(grad, weight, offsets), honest.product_for_weight(x, grad, offsets), None


for _name, _function in {
    "its gradient does not depend on what it was taken for": _Constant,
    "the graph of the gradients is cut in backward": _Cut,
    "the graph of one gradient is cut in backward": _CutForX,
    "backward can be differentiated once alone": _Once,
}.items():
    MUTANTS.append(
        Mutant(
            _name,
            "moe.grouped_mm",
            "second_derivatives",
            lambda function=_function: (lambda call: function.apply(call.x, call.weight, call.offsets),),
            {"differentiable": True},
        )
    )
