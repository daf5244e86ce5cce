"""The three products of a linear layer on 8-bit operands, as one autograd function."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kpt_fp8.dequantize import dequantize
from kpt_fp8.quantize import quantize
from kpt_fp8.scaled_mm import scaled_mm

from .quantizing import ERROR, GRADIENT, INPUT, WEIGHT, current, error_of, observed_delayed, observed_now
from .recipe import FP8Recipe

#: What shares a scale, of rows and of the weight.
_SHARED = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128")}


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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, observed: Tensor, scales: Tensor | None, how: How
    ) -> Tensor:
        """Multiply `[M, K]` by a weight `[N, K]`: `[M, N]` of `x`'s dtype."""
        recipe = how.recipe
        of_rows, of_weight = _SHARED[recipe.granularity]
        x_codes, x_scale = _quantised(x, recipe.dtype, of_rows, INPUT, observed, scales, how)
        w_codes, w_scale = _quantised(weight, recipe.dtype, of_weight, WEIGHT, observed, scales, how)
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
        if ctx.needs_input_grad[0]:
            # Rows of the transposed weight have scales of their own.
            right = (weight, None) if of_weight == "row" else (w_codes, w_scale)
        if ctx.needs_input_grad[1]:
            if of_rows == "tensor":
                left = x_codes, x_scale
            elif of_rows == "row":
                left = x, None
            else:
                left = current(x.t(), recipe.dtype, of_rows)[:2]
        ctx.save_for_backward(*left, *right)
        ctx.observed, ctx.scales, ctx.how = observed, scales, how
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `x`, weight and bias."""
        x, x_scale, weight, w_scale = ctx.saved_tensors
        how: How = ctx.how
        recipe = how.recipe
        of_rows, of_weight = _SHARED[recipe.granularity]
        grad_x = grad_weight = grad_bias = None
        codes = scale = gradient.new_empty(0)
        if ctx.needs_input_grad[0] or (ctx.needs_input_grad[1] and of_rows == "tensor"):
            codes, scale = _quantised(gradient, recipe.gradient_dtype, of_rows, GRADIENT, ctx.observed, ctx.scales, how)
        if ctx.needs_input_grad[0]:
            if of_weight == "row":
                transposed, w_scale, _ = current(weight.t(), recipe.dtype, of_weight)
                weight = transposed.t()
            grad_x = scaled_mm(
                codes, weight, scale, w_scale, granularity_a=of_rows, granularity_b=of_weight, out_dtype=gradient.dtype
            )
        if ctx.needs_input_grad[1]:
            if of_rows == "row":
                grad_weight = (gradient.t() @ x).to(ctx.weight_dtype)
            else:
                if of_rows == "tensor":
                    left, right = codes.t(), x
                else:
                    left, scale, _ = current(gradient.t(), recipe.gradient_dtype, of_rows)
                    right, x_scale = x.t(), x_scale.t()
                grad_weight = scaled_mm(
                    left,
                    right,
                    scale,
                    x_scale,
                    granularity_a=of_rows,
                    granularity_b=of_rows,
                    out_dtype=ctx.weight_dtype,
                )
        if ctx.needs_input_grad[2]:
            grad_bias = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def plain_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, observed: Tensor, scales: Tensor | None, how: How
) -> Tensor:
    """Multiply what was quantised in plain PyTorch, as often differentiable as asked for: what runs under torch.func.

    The result is `Product`'s but for rounding. Gradients pass quantisation as they are (straight through) and are not
    quantised themselves; nothing is observed.
    """
    unseen = replace(how, observes=False)

    def rounded(tensor: Tensor, granularity: str, role: int) -> Tensor:
        codes, scale = _quantised(tensor.detach(), how.recipe.dtype, granularity, role, observed, scales, unseen)
        near = dequantize(codes, scale, granularity=granularity, dtype=tensor.dtype)
        return tensor + (near - tensor).detach()

    of_rows, of_weight = _SHARED[how.recipe.granularity]
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
        observed[role].copy_(torch.maximum(observed[role], seen))
    return codes, scale
