"""The grouped matrix product of experts: op `moe.grouped_mm`, and `moe.grouped_mm_wgrad` for its weights' gradient."""

from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, next_power_of_two, op

from . import _accelerators, _loops  # noqa: F401  _accelerators: the same ops where host loops would wait

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES_OF_DTYPES = "float64, float32, bfloat16 or float16"


def _check_groups(name: str, x: Tensor, other: Tensor, other_name: str, offsets: Tensor, num_groups: int) -> None:
    if offsets.dim() != 1 or offsets.dtype is not torch.int32 or offsets.shape[0] != num_groups:
        raise InputError(
            f"{name}: offsets must be int32 of shape [{num_groups}], one end row per expert; "
            f"got {offsets.dtype} {list(offsets.shape)}"
        )
    if x.dtype not in DTYPES or x.dtype is not other.dtype:
        raise InputError(
            f"{name}: x and {other_name} must have one floating dtype, of {NAMES_OF_DTYPES}; "
            f"got {x.dtype} and {other.dtype}: convert one"
        )
    if x.device != other.device or x.device != offsets.device:
        raise InputError(
            f"{name}: x, {other_name} and offsets must be on one device; "
            f"got {x.device}, {other.device} and {offsets.device}"
        )


def _check_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise InputError(
            "moe.grouped_mm: x must be [rows, K] and weight [num_experts, K, N] with equal K; "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    _check_groups("moe.grouped_mm", x, weight, "weight", offsets, weight.shape[0])


def _check_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> None:
    if x.dim() != 2 or grad.dim() != 2 or x.shape[0] != grad.shape[0]:
        raise InputError(
            "moe.grouped_mm_wgrad: x must be [rows, K] and grad [rows, N] with equal rows; "
            f"got {list(x.shape)} and {list(grad.shape)}"
        )
    _check_groups("moe.grouped_mm_wgrad", x, grad, "grad", offsets, offsets.shape[0])


def _size_key(x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, K, N, experts, and which of K and N is contiguous."""
    experts, inner, columns = weight.shape
    return next_power_of_two(x.shape[0]), inner, columns, experts, "KN" if weight.stride(2) == 1 else "NK"


def _size_key_of_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> tuple[int | str, ...]:
    return next_power_of_two(x.shape[0]), x.shape[1], grad.shape[1], offsets.shape[0]


@op("moe.grouped_mm", check=_check_grouped_mm, autocast=("x", "weight"), size_key=_size_key)
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each expert's contiguous rows by that expert's matrix.

    Args:
        x: `[rows, K]`, sorted by expert; float64, float32, bfloat16 or float16.
        weight: `[num_experts, K, N]`, any strides: pass `w.transpose(1, 2)` for matrices stored as `[N, K]`.
        offsets: `[num_experts]` int32, the end row of each expert; non-decreasing. An expert may have no rows.

    Returns:
        `[rows, N]` of x's dtype. Rows at and past `offsets[-1]` are zero, whatever `x` holds there.

    Raises:
        InputError: a shape, dtype or device does not fit.

    Source: torch.nn.functional.grouped_mm (2D x 3D form), whose trailing rows are uninitialised; MegaBlocks
    (arXiv:2211.15841).
    """
    return _GroupedMM.apply(x, weight, offsets)  # type: ignore[no-any-return,no-untyped-call]


@op("moe.grouped_mm_wgrad", check=_check_wgrad, autocast=("x", "grad"), size_key=_size_key_of_wgrad)
def grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Multiply, for each expert, its rows of `x` transposed by its rows of `grad`: the gradient of its weights.

    Args:
        x: `[rows, K]`, sorted by expert.
        grad: `[rows, N]`, likewise.
        offsets: `[num_experts]` int32, the end row of each expert.

    Returns:
        `[num_experts, K, N]` of x's dtype; zero for experts without rows. Rows at and past `offsets[-1]` are not read.

    Raises:
        InputError: a shape, dtype or device does not fit.
    """
    return _GroupedMMWgrad.apply(x, grad, offsets)  # type: ignore[no-any-return,no-untyped-call]


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _loops.grouped_mm(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_mm(grad, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = wgrad_like(weight, x, grad, offsets)
        return grad_x, grad_weight, None


class _GroupedMMWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, grad, offsets)
        return _loops.grouped_mm_wgrad(x, grad, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_weight,) = grads
        x, grad, offsets = ctx.saved_tensors
        grad_x = grouped_mm(grad, grad_weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
        grad_grad = grouped_mm(x, grad_weight, offsets) if ctx.needs_input_grad[1] else None
        return grad_x, grad_grad, None


def wgrad_like(weight: Tensor, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The weights' gradient in the weights' own memory order, which spares autograd a copy."""
    if weight.stride(1) < weight.stride(2):
        return grouped_mm_wgrad(grad, x, offsets).transpose(1, 2)
    return grouped_mm_wgrad(x, grad, offsets)
