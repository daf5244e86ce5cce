"""The grouped matrix product of experts: op `moe.grouped_mm`, and `moe.grouped_mm_wgrad` for its weights' gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kpt_core import Call, InputError, op
from kpt_core.policy import next_power_of_two

from ._dtypes import DTYPES, NAMES_OF_DTYPES


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


def _check_grouped_mm(call: Call) -> None:
    x, weight = call.x, call.weight
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise InputError(
            "moe.grouped_mm: x must be [rows, K] and weight [num_experts, K, N] with equal K; "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    _check_groups("moe.grouped_mm", x, weight, "weight", call.offsets, weight.shape[0])


def _check_wgrad(call: Call) -> None:
    x, grad = call.x, call.grad
    if x.dim() != 2 or grad.dim() != 2 or x.shape[0] != grad.shape[0]:
        raise InputError(
            "moe.grouped_mm_wgrad: x must be [rows, K] and grad [rows, N] with equal rows; "
            f"got {list(x.shape)} and {list(grad.shape)}"
        )
    _check_groups("moe.grouped_mm_wgrad", x, grad, "grad", call.offsets, call.offsets.shape[0])


def _fake(call: Call) -> Tensor:
    return call.x.new_empty(call.x.shape[0], call.weight.shape[2])  # type: ignore[no-any-return]


def _fake_of_wgrad(call: Call) -> Tensor:
    return call.x.new_empty(call.offsets.shape[0], call.x.shape[1], call.grad.shape[1])  # type: ignore[no-any-return]


def flops_of_products(call: Call) -> int:
    """Of each row of `x` by a matrix of `weight`."""
    return 2 * call.x.shape[0] * call.weight.shape[1] * call.weight.shape[2]  # type: ignore[no-any-return]


def _flops_of_wgrad(call: Call) -> int:
    return 2 * call.x.shape[0] * call.x.shape[1] * call.grad.shape[1]  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, K, N, experts, and which of K and N is contiguous."""
    experts, inner, columns = call.weight.shape
    return next_power_of_two(call.x.shape[0]), inner, columns, experts, "KN" if call.weight.stride(2) == 1 else "NK"


def _size_key_of_wgrad(call: Call) -> tuple[int | str, ...]:
    return next_power_of_two(call.x.shape[0]), call.x.shape[1], call.grad.shape[1], call.offsets.shape[0]


def owned_rows(rows: int, offsets: Tensor) -> Iterator[Tensor]:
    """For each expert, which of the sorted rows it owns, `[rows, 1]` bool."""
    row = torch.arange(rows, device=offsets.device).unsqueeze(1)
    starts = torch.cat((torch.zeros_like(offsets[:1]), offsets[:-1]))
    for start, end in zip(starts.unbind(0), offsets.unbind(0), strict=True):
        yield (row >= start) & (row < end)


@op(
    "moe.grouped_mm",
    check=_check_grouped_mm,
    fake=_fake,
    flops=flops_of_products,
    size_key=_size_key,
    autocast=("x", "weight"),
)
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
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for own, matrix in zip(owned_rows(x.shape[0], offsets), weight.unbind(0), strict=True):
        out = torch.where(own, torch.where(own, x, 0) @ matrix, out)
    return out


@op(
    "moe.grouped_mm_wgrad",
    check=_check_wgrad,
    fake=_fake_of_wgrad,
    flops=_flops_of_wgrad,
    size_key=_size_key_of_wgrad,
    autocast=("x", "grad"),
)
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
    owned = owned_rows(x.shape[0], offsets)
    products = [torch.where(own, x, 0).mT @ torch.where(own, grad, 0) for own in owned]
    return torch.stack(products) if products else x.new_zeros(0, x.shape[1], grad.shape[1])
