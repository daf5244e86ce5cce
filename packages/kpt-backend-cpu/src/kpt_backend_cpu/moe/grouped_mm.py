"""`moe.grouped_mm` and `moe.grouped_mm_wgrad`: natively, each expert's rows times its matrix."""

from typing import Any

import torch
from torch import Tensor

from kpt_backend_cpu import native

from .amx import refusal_for_amx
from .operators import call
from .tensors import (
    address,
    differentiates,
    matrices,
    refusal_of_transforms,
    require_offsets,
    rows,
    with_whole_columns_or_rows,
    with_whole_rows,
)

_library = torch.library.Library("kpt_backend_cpu", "FRAGMENT")
_library.define("grouped_mm(Tensor x, Tensor weight, Tensor offsets) -> Tensor")
_library.define("grouped_mm_wgrad(Tensor x, Tensor grad, Tensor offsets) -> Tensor")


def unsupported(x: Tensor, weight: Tensor, offsets: Tensor) -> str | None:
    """Why a call of `moe.grouped_mm` is not for this kernel, or None."""
    return refusal_of_transforms() or refusal_for_amx(x.dtype)


def unsupported_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> str | None:
    """Why a call of `moe.grouped_mm_wgrad` is not for this kernel, or None."""
    return refusal_of_transforms() or refusal_for_amx(x.dtype)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`moe.grouped_mm`, summed in float32; differentiable, twice too."""
    if not differentiates(x, weight):
        operator = torch.ops.kpt_backend_cpu.grouped_mm.default
        return call(operator, _grouped_mm, x, weight, offsets)  # type: ignore[no-any-return]
    return _GroupedMM.apply(x, weight, offsets)  # type: ignore[no-any-return,no-untyped-call]


def grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """`moe.grouped_mm_wgrad`, summed in float32; differentiable, twice too."""
    if not differentiates(x, grad):
        operator = torch.ops.kpt_backend_cpu.grouped_mm_wgrad.default
        return call(operator, _grouped_mm_wgrad, x, grad, offsets)  # type: ignore[no-any-return]
    return _GroupedMMWgrad.apply(x, grad, offsets)  # type: ignore[no-any-return,no-untyped-call]


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return torch.ops.kpt_backend_cpu.grouped_mm.default(x, weight, offsets)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_mm(grad, weight.mT, offsets)
        if ctx.needs_input_grad[1]:
            # In the weights' own memory order, which spares autograd a copy.
            grad_weight = (
                grouped_mm_wgrad(grad, x, offsets).mT
                if weight.stride(1) < weight.stride(2)
                else grouped_mm_wgrad(x, grad, offsets)
            )
        return grad_x, grad_weight, None


class _GroupedMMWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, grad, offsets)
        return torch.ops.kpt_backend_cpu.grouped_mm_wgrad.default(x, grad, offsets)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_weight,) = grads
        x, grad, offsets = ctx.saved_tensors
        grad_x = grouped_mm(grad, grad_weight.mT, offsets) if ctx.needs_input_grad[0] else None
        grad_grad = grouped_mm(x, grad_weight, offsets) if ctx.needs_input_grad[1] else None
        return grad_x, grad_grad, None


@torch.library.impl(_library, "grouped_mm", "CPU")
def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return multiply("moe.grouped_mm", x, weight, offsets, x.dtype)


def multiply(
    op: str,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """Call the kernel.

    Args:
        op: what messages name.
        x: `[rows, K]`, sorted by expert.
        weight: `[experts, K, N]`, any strides.
        offsets: `[experts]` int32, the end row of each expert.
        out_dtype: of the result.
        scale: float32 `[experts, a, b]`, scales of 8-bit weights.
        x_scale: float32 `[rows, 1 or blocks]`, scales of an 8-bit x.

    Returns:
        `[rows, N]`; rows of no expert are zero.

    Raises:
        InputError: offsets decrease or end past the last row.
        MemoryError: there is no room for intermediate results.
    """
    experts, inner, columns = weight.shape
    count = x.shape[0]
    out = x.new_empty((count, columns), dtype=out_dtype)
    offsets = require_offsets(op, offsets, count)
    if out.numel() == 0 or inner == 0 or experts == 0:
        return out.zero_()
    x, weight = with_whole_rows(x), with_whole_columns_or_rows(weight)
    x_scale = None if x_scale is None else x_scale.contiguous()
    native.run(
        "kpt_grouped_mm",
        *rows(x),
        *rows(out),
        *matrices(weight, scale),
        address(x_scale),
        0 if x_scale is None else x_scale.shape[1],
        offsets.data_ptr(),
        count,
        inner,
        columns,
        experts,
        torch.get_num_threads(),
    )
    return out


@torch.library.impl(_library, "grouped_mm_wgrad", "CPU")
def _grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    count, inner, columns, experts = *x.shape, grad.shape[1], offsets.shape[0]
    out = x.new_empty(experts, inner, columns)
    offsets = require_offsets("moe.grouped_mm_wgrad", offsets, count)
    if out.numel() == 0 or count == 0:
        return out.zero_()
    x, grad = with_whole_rows(x), with_whole_rows(grad)
    native.run(
        "kpt_grouped_mm_wgrad",
        *rows(x),
        *rows(grad),
        out.data_ptr(),
        offsets.data_ptr(),
        count,
        inner,
        columns,
        experts,
        torch.get_num_threads(),
    )
    return out


@torch.library.register_fake("kpt_backend_cpu::grouped_mm", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_mm_fake(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.register_fake("kpt_backend_cpu::grouped_mm_wgrad", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_mm_wgrad_fake(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])
