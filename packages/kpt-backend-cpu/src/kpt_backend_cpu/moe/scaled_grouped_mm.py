"""`moe.scaled_grouped_mm`: natively, 8-bit weights widened as they are read."""

from typing import Any

import torch
from torch import Tensor

from .grouped_mm import multiply
from .operators import call
from .tensors import differentiates, refusal_of_transforms

_library = torch.library.Library("kpt_backend_cpu", "FRAGMENT")
_library.define(
    "scaled_grouped_mm(Tensor x, Tensor weight, Tensor scale, Tensor? x_scale, Tensor offsets, ScalarType out_dtype) "
    "-> Tensor"
)


def unsupported(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Why a call is not for this kernel, or None."""
    if out_dtype is torch.float64:
        return "a result in float64; needs float32, bfloat16 or float16"
    return refusal_of_transforms()


def scaled_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`moe.scaled_grouped_mm`, summed in float32, scales of float64 rounded to it; differentiable in a floating x."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    scale = (scale.unsqueeze(1) if scale.dim() == 2 else scale).float()
    x_scale = None if x_scale is None else x_scale.float()
    if not differentiates(x):
        operator = torch.ops.kpt_backend_cpu.scaled_grouped_mm.default
        return call(  # type: ignore[no-any-return]
            operator, _scaled_grouped_mm, x, weight, scale, x_scale, offsets, out_dtype
        )
    return _ScaledGroupedMM.apply(x, weight, scale, x_scale, offsets, out_dtype)  # type: ignore[no-any-return,no-untyped-call]


class _ScaledGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        x_scale: Tensor | None,
        offsets: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, offsets)
        ctx.dtype = x.dtype
        return torch.ops.kpt_backend_cpu.scaled_grouped_mm.default(  # type: ignore[no-any-return]
            x, weight, scale, x_scale, offsets, out_dtype
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, scale, offsets = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = scaled_grouped_mm(grad, weight.mT, scale.mT, offsets, out_dtype=ctx.dtype)
        return grad_x, None, None, None, None, None


@torch.library.impl(_library, "scaled_grouped_mm", "CPU")
def _scaled_grouped_mm(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return multiply("moe.scaled_grouped_mm", x, weight, offsets, out_dtype, scale=scale, x_scale=x_scale)


@torch.library.register_fake("kpt_backend_cpu::scaled_grouped_mm", lib=_library)  # type: ignore[untyped-decorator]
def _scaled_grouped_mm_fake(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]), dtype=out_dtype)
