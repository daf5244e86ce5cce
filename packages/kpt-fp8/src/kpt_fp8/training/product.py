"""The three products of a linear layer on 8-bit operands, as one autograd function."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kpt_fp8.dequantize import dequantize
from kpt_fp8.quantize import quantize
from kpt_fp8.scaled_mm import scaled_mm

from .quantizing import ERROR, GRADIENT, INPUT, WEIGHT, current, error_of, observed_delayed, observed_now
from .recipe import FP8Recipe

#: What shares a scale, of rows and of the weight.
SHARED = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128")}
#: Of `x` and of the weight, the numbers and their scale.
Saved: TypeAlias = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class How:
    """How a call of a layer quantises; `delayed` tells by role whether the delayed scale is used."""

    recipe: FP8Recipe
    delayed: tuple[bool, bool, bool]
    observes: bool
    measures: bool


class Product(torch.autograd.Function):
    """`x @ weight.t() + bias`; its gradients are 8-bit products as well. It has no second derivative.

    What is observed is written as the maximum of what was there and what is seen now. So it makes no difference that
    activation checkpointing runs a forward pass again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        observed: Tensor,
        observed_gradient: Tensor,
        scales: Tensor | None,
        how: How,
    ) -> Tensor:
        """Multiply `[M, K]` by a weight `[N, K]`: `[M, N]` of `x`'s dtype."""
        out, saved = multiply(x, weight, bias, observed, scales, how, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*saved)
        ctx.observed, ctx.scales, ctx.how = observed_gradient, scales, how
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `x`, weight and bias."""
        saved, needs, dtypes = ctx.saved_tensors, ctx.needs_input_grad[:3], (ctx.weight_dtype, ctx.bias_dtype)
        return (*gradients(gradient, saved, ctx.observed, ctx.scales, ctx.how, needs, *dtypes), None, None, None, None)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    observed: Tensor,
    scales: Tensor | None,
    how: How,
    needs: Sequence[bool],
) -> tuple[Tensor, Saved]:
    """Multiply, write what is observed, and give what `gradients` of `x` and of the weight, if needed, go by."""
    recipe = how.recipe
    of_rows, of_weight = SHARED[recipe.granularity]
    x_codes, x_scale = _quantised(x, recipe.dtype, of_rows, INPUT, observed[INPUT], scales, how)
    w_codes, w_scale = _quantised(weight, recipe.dtype, of_weight, WEIGHT, observed[WEIGHT], scales, how)
    out = scaled_mm(
        x_codes,
        w_codes.t(),
        x_scale,
        w_scale.t() if of_weight == "128x128" else w_scale,
        bias,
        granularity_a=of_rows,
        granularity_b=of_weight,
        out_dtype=x.dtype,
    )
    left: tuple[Tensor | None, Tensor | None] = (None, None)
    right: tuple[Tensor | None, Tensor | None] = (None, None)
    if needs[0]:
        # Rows of the transposed weight have scales of their own.
        right = (weight, None) if of_weight == "row" else (w_codes, w_scale)
    if needs[1]:
        if of_rows == "tensor":
            left = x_codes, x_scale
        elif of_rows == "row":
            left = x, None
        else:
            left = current(x.t(), recipe.dtype, of_rows)[:2]
    return out, (*left, *right)


def gradients(
    gradient: Tensor,
    saved: Saved,
    observed: Tensor,
    scales: Tensor | None,
    how: How,
    needs: Sequence[bool],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of `x`, weight and bias that are needed, and write what is observed."""
    x, x_scale, weight, w_scale = saved
    recipe = how.recipe
    of_rows, of_weight = SHARED[recipe.granularity]
    grad_x = grad_weight = grad_bias = None
    codes = scale = gradient.new_empty(0)
    if needs[0] or (needs[1] and of_rows == "tensor"):
        codes, scale = _quantised(gradient, recipe.gradient_dtype, of_rows, GRADIENT, observed[0], scales, how)
    if needs[0]:
        assert weight is not None
        if of_weight == "row":
            transposed, w_scale, _ = current(weight.t(), recipe.dtype, of_weight)
            weight = transposed.t()
        assert w_scale is not None
        grad_x = scaled_mm(
            codes, weight, scale, w_scale, granularity_a=of_rows, granularity_b=of_weight, out_dtype=gradient.dtype
        )
    if needs[1]:
        assert x is not None
        if of_rows == "row":
            grad_weight = (gradient.t() @ x).to(weight_dtype)
        else:
            assert x_scale is not None
            if of_rows == "tensor":
                left, right = codes.t(), x
            else:
                left, scale, _ = current(gradient.t(), recipe.gradient_dtype, of_rows)
                right, x_scale = x.t(), x_scale.t()
            grad_weight = scaled_mm(
                left, right, scale, x_scale, granularity_a=of_rows, granularity_b=of_rows, out_dtype=weight_dtype
            )
    if needs[2]:
        grad_bias = gradient.sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


def plain_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    observed: Tensor,
    observed_gradient: Tensor,
    scales: Tensor | None,
    how: How,
) -> Tensor:
    """Multiply what was quantised in plain PyTorch, as often differentiable as asked for: what runs under torch.func.

    The result is `Product`'s but for rounding. Gradients pass quantisation as they are (straight through) and are not
    quantised themselves; nothing is observed.
    """
    unseen = replace(how, observes=False)

    def rounded(tensor: Tensor, granularity: str, role: int) -> Tensor:
        codes, scale = _quantised(tensor.detach(), how.recipe.dtype, granularity, role, observed[role], scales, unseen)
        near = dequantize(codes, scale, granularity=granularity, dtype=tensor.dtype)
        return tensor + (near - tensor).detach()

    of_rows, of_weight = SHARED[how.recipe.granularity]
    product = rounded(x, of_rows, INPUT) @ rounded(weight, of_weight, WEIGHT).to(x.dtype).t()
    return product if bias is None else product + bias.to(x.dtype)


def _quantised(
    x: Tensor, dtype: torch.dtype, granularity: str, role: int, observed: Tensor, scales: Tensor | None, how: How
) -> tuple[Tensor, Tensor]:
    if scales is not None and how.delayed[role]:
        codes, scale = quantize(x, scales[role], dtype=dtype, granularity=granularity)
        seen = observed_delayed(codes, scale) if how.observes else None
    else:
        codes, scale, amax = current(x, dtype, granularity)
        seen = observed_now(codes, amax) if how.observes else None
    if seen is not None:
        if how.measures:
            seen[ERROR] = error_of(x, codes, scale, granularity)
        observed.copy_(torch.maximum(observed, seen))
    return codes, scale
