"""The product of a training layer as one op forward and one backward, for compilers: `opaque_product`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kpt_fp8.scales import scale_shape

from .product import SHARED, How, gradients, multiply
from .recipe import FP8Recipe


def opaque_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    observed: Tensor,
    observed_gradient: Tensor,
    scales: Tensor | None,
    how: How,
) -> Tensor:
    """Do what `Product` does, bit for bit, in two ops that change none of their arguments.

    They give what is observed, so that to write it is left to the compiler, which may not lose it.
    """
    recipe = how.recipe
    plain = (recipe.granularity, recipe.dtype, recipe.gradient_dtype, how.delayed, how.observes, how.measures)
    needs = [torch.is_grad_enabled() and each.requires_grad for each in (x, weight)]
    out: Tensor
    out, seen, *_ = _forward(x, weight, bias, observed, observed_gradient, scales, *plain, needs)
    if how.observes:
        observed.copy_(seen)
    return out


@cache
def _how(
    granularity: str,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    delayed: tuple[bool, bool, bool],
    observes: bool,
    measures: bool,
) -> How:
    recipe = FP8Recipe(granularity=granularity, dtype=dtype, gradient_dtype=gradient_dtype)
    return How(recipe, delayed, observes, measures)


@torch.library.custom_op("kpt_fp8::training_product", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    observed: Tensor,
    observed_gradient: Tensor,  # for the backward pass alone
    scales: Tensor | None,
    granularity: str,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    delayed: Sequence[bool],
    observes: bool,
    measures: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    how = _how(granularity, dtype, gradient_dtype, (delayed[0], delayed[1], delayed[2]), observes, measures)
    seen = observed.clone()
    with torch._C._DisableAutocast():
        out, (left, left_scale, right, right_scale) = multiply(x, weight, bias, seen, scales, how, needs)
    if granularity == "row":  # they are arguments
        left = right = None
    # One set of codes may serve both, and torch takes results for tensors of their own.
    kept = (x.new_empty(0) if each is None else each for each in (left, left_scale, right, right_scale))
    return out.contiguous(), seen, *kept  # type: ignore[return-value]


@_forward.register_fake
def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    observed: Tensor,
    observed_gradient: Tensor,
    scales: Tensor | None,
    granularity: str,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    delayed: Sequence[bool],
    observes: bool,
    measures: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    of_rows, of_weight = SHARED[granularity]
    # Blocks of the input are along what the gradient of the weight sums over.
    x_shape = list(x.t().shape if of_rows == "1x128" else x.shape)
    kept = []
    for need, shape, shared in ((needs[1], x_shape, of_rows), (needs[0], list(weight.shape), of_weight)):
        if need and granularity != "row":
            kept += [x.new_empty(shape, dtype=dtype), x.new_empty(scale_shape(shape, shared), dtype=torch.float32)]
        else:
            kept += [x.new_empty(0), x.new_empty(0)]
    return x.new_empty(x.shape[0], weight.shape[0]), torch.empty_like(observed), *kept


@torch.library.custom_op("kpt_fp8::training_product_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    w_scale: Tensor | None,
    observed: Tensor,
    scales: Tensor | None,
    granularity: str,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    delayed: Sequence[bool],
    observes: bool,
    measures: bool,
    needs: Sequence[bool],
    in_features: int,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = _how(granularity, dtype, gradient_dtype, (delayed[0], delayed[1], delayed[2]), observes, measures)
    seen = observed.clone()
    saved = x, x_scale, weight, w_scale
    with torch._C._DisableAutocast():
        found = gradients(gradient, saved, seen, scales, how, needs, weight_dtype, bias_dtype)
    return *(gradient.new_empty(0) if each is None else each.contiguous() for each in found), seen  # type: ignore[return-value]


@_backward.register_fake
def _fake_backward(
    gradient: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    w_scale: Tensor | None,
    observed: Tensor,
    scales: Tensor | None,
    granularity: str,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    delayed: Sequence[bool],
    observes: bool,
    measures: bool,
    needs: Sequence[bool],
    in_features: int,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    rows, out_features = gradient.shape
    shapes = ((rows, in_features), (out_features, in_features), (out_features,))
    dtypes = (gradient.dtype, weight_dtype, bias_dtype)
    found = (
        gradient.new_empty(shape, dtype=dtype) if need else gradient.new_empty(0)
        for need, shape, dtype in zip(needs, shapes, dtypes, strict=True)
    )
    return *found, torch.empty_like(observed)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.observed, ctx.scales, *ctx.plain, needs = inputs
    x_codes, x_scale, w_codes, w_scale = output[2:]
    own = ctx.plain[0] == "row"
    left = (x, None) if own else (x_codes, x_scale)
    right = (weight, None) if own else (w_codes, w_scale)
    ctx.save_for_backward(*(left if needs[1] else (None, None)), *(right if needs[0] else (None, None)))
    ctx.more = x.shape[1], weight.dtype, weight.dtype if bias is None else bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_graph(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    if gradient is None:
        return (None,) * len(ctx.needs_input_grad)
    *found, seen = _backward(gradient, *ctx.saved_tensors, ctx.observed, ctx.scales, *ctx.plain, needs, *ctx.more)
    if ctx.plain[-2]:  # observes
        ctx.observed.copy_(seen)
    given = [each if need else None for each, need in zip(found, needs, strict=True)]
    return (*given, *[None] * (len(ctx.needs_input_grad) - len(given)))


_forward.register_autograd(_backward_of_graph, setup_context=_setup_context)
