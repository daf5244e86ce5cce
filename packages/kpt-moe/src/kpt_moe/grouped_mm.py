"""The grouped matrix product of experts: op `moe.grouped_mm`, and `moe.grouped_mm_wgrad` for its weights' gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import InputError, op

from . import _loops

#: What `torch.nn.functional.grouped_mm` (torch >= 2.10) multiplies.
_NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Rows per tile where no native grouped product exists: few enough to waste little on small experts.
_TILE = 64


def _check_groups(name: str, x: Tensor, other: Tensor, other_name: str, offsets: Tensor, num_groups: int) -> None:
    if offsets.dim() != 1 or offsets.dtype is not torch.int32 or offsets.shape[0] != num_groups:
        raise InputError(
            f"{name}: offsets must be int32 of shape [{num_groups}], one end row per expert; "
            f"got {offsets.dtype} {list(offsets.shape)}"
        )
    if not x.is_floating_point() or x.dtype is not other.dtype:
        raise InputError(
            f"{name}: x and {other_name} must have one floating dtype; got {x.dtype} and {other.dtype}: convert one"
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


@op("moe.grouped_mm", check=_check_grouped_mm, autocast=("x", "weight"))
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


@op("moe.grouped_mm_wgrad", check=_check_wgrad, autocast=("x", "grad"))
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
        return _multiply(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_mm(grad, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = _wgrad_like(weight, x, grad, offsets)
        return grad_x, grad_weight, None


class _GroupedMMWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, grad, offsets)
        return _multiply_wgrad(x, grad, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_weight,) = grads
        x, grad, offsets = ctx.saved_tensors
        grad_x = grouped_mm(grad, grad_weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
        grad_grad = grouped_mm(x, grad_weight, offsets) if ctx.needs_input_grad[1] else None
        return grad_x, grad_grad, None


def _wgrad_like(weight: Tensor, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The weights' gradient in the weights' own memory order, which spares autograd a copy."""
    if weight.stride(1) < weight.stride(2):
        return grouped_mm_wgrad(grad, x, offsets).transpose(1, 2)
    return grouped_mm_wgrad(x, grad, offsets)


def _multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if x.device.type in ("cpu", "meta"):
        return _loops.grouped_mm(x, weight, offsets)
    inside = _inside(x, offsets)
    if _native(x, weight):
        return torch.where(inside, F.grouped_mm(x.contiguous(), weight, offs=offsets), 0)
    return _tiled_mm(x, weight, offsets)


def _multiply_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    if x.device.type in ("cpu", "meta"):
        return _loops.grouped_mm_wgrad(x, grad, offsets)
    if _native(x, grad):
        return F.grouped_mm(x.contiguous().t(), grad.contiguous(), offs=offsets)
    return _tiled_wgrad(x, grad, offsets)


def _native(x: Tensor, other: Tensor) -> bool:
    """Whether torch's own grouped product takes these operands; it wants rows of a multiple of 16 bytes."""
    return (
        hasattr(F, "grouped_mm")
        and x.dtype in _NATIVE_DTYPES
        and x.shape[0] > 0
        and all(size * x.element_size() % 16 == 0 for size in (x.shape[-1], other.shape[-1]))
    )


def _inside(x: Tensor, offsets: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return (rows < offsets[-1:]).unsqueeze(1)


def _tiles(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the rows into tiles of one expert each, without knowing on the host where the experts end.

    Returns:
        The expert of each tile `[tiles]`, the row of each place in it `[tiles, _TILE]` (clamped to valid rows), and
        whether that place is taken `[tiles, _TILE]`. The number of tiles is the upper bound `rows / _TILE + experts`.
    """
    num_experts = offsets.shape[0]
    ends = offsets.long()
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    last_tile = torch.cumsum((ends - starts + _TILE - 1) // _TILE, 0)
    tile = torch.arange(rows // _TILE + num_experts, device=offsets.device)
    expert = torch.searchsorted(last_tile, tile, right=True).clamp(max=num_experts - 1)
    first_tile = last_tile - (ends - starts + _TILE - 1) // _TILE
    first_row = starts[expert] + (tile - first_tile[expert]) * _TILE
    row = first_row.unsqueeze(1) + torch.arange(_TILE, device=offsets.device)
    taken = (row < ends[expert].unsqueeze(1)) & (tile < last_tile[-1]).unsqueeze(1)
    return expert, row.clamp(max=max(rows - 1, 0)), taken


def _tiled_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """For dtypes and versions without a native product: a batched product over tiles, static in shape."""
    rows, columns = x.shape[0], weight.shape[2]
    if rows == 0:
        return x.new_zeros(0, columns)
    expert, row, taken = _tiles(rows, offsets)
    x_tiles = torch.where(taken.unsqueeze(-1), x[row], 0)
    y_tiles = torch.bmm(x_tiles, weight[expert])
    out = x.new_zeros(rows + 1, columns)
    return out.index_copy(0, torch.where(taken, row, rows).flatten(), y_tiles.flatten(0, 1))[:rows]


def _tiled_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    # An expert has many tiles: their sum must not be rounded at each of them.
    total = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(offsets.shape[0], x.shape[1], grad.shape[1], dtype=total, device=x.device)
    if x.shape[0] > 0:
        expert, row, taken = _tiles(x.shape[0], offsets)
        x_tiles, grad_tiles = (torch.where(taken.unsqueeze(-1), t[row], 0) for t in (x, grad))
        out = out.index_add(0, expert, torch.bmm(x_tiles.transpose(1, 2), grad_tiles).to(total))
    return out.to(x.dtype)
