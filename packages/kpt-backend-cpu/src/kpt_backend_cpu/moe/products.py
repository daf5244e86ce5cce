"""The grouped products behind `moe.grouped_mm`, its weights' gradient and `moe.scaled_grouped_mm`."""

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.amx import refusal_for_amx
from kpt_backend_cpu.structures import NO_BIAS
from kpt_backend_cpu.tensors import address, matrices, rows
from kpt_core import Call, InputError


def unsupported(call: Call) -> str | None:
    """Why a product of floating numbers is not for these kernels, or None."""
    return refusal_for_amx(call.x.dtype)


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
    """Each expert's rows times its matrix; all tensors have to be `tensors.readable`.

    Args:
        op: what messages name.
        x: `[rows, K]`, sorted by expert.
        weight: `[experts, K, N]`.
        offsets: `[experts]` int32, the end row of each expert.
        out_dtype: of the result.
        scale: float32, scales of 8-bit weights, as `tensors.matrices` has them.
        x_scale: float32 `[rows, 1 or blocks]`, contiguous, scales of an 8-bit x.

    Returns:
        `[rows, N]`; rows of no expert are zero.

    Raises:
        InputError: offsets decrease or end past the last row.
        MemoryError: there is no room for intermediate results.
    """
    experts, inner, columns = weight.shape
    count = x.shape[0]
    _require_offsets(op, offsets, count)
    out = x.new_empty((count, columns), dtype=out_dtype)
    if out.numel() == 0 or inner == 0 or experts == 0:
        return out.zero_()
    # What a row shares multiplies its sums: codes alone have the fastest products.
    of_sums = None
    if x_scale is not None and x_scale.shape[1] == 1:
        of_sums, x_scale = x_scale, None
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
        *(address(of_sums), *NO_BIAS),
    )
    return out


def multiply_transposed(op: str, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """`x[rows of e]^T @ grad[rows of e]` for each expert, `[experts, K, N]`; arguments and errors as in `multiply`."""
    count, inner, columns, experts = *x.shape, grad.shape[1], offsets.shape[0]
    _require_offsets(op, offsets, count)
    out = x.new_empty(experts, inner, columns)
    if out.numel() == 0 or count == 0:
        return out.zero_()
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


def _require_offsets(op: str, offsets: Tensor, count: int) -> None:
    """Raise unless these are end rows within `count`: kernels would read what is not there."""
    ends = offsets.tolist()
    if ends and (ends[0] < 0 or ends[-1] > count or sorted(ends) != ends):
        raise InputError(f"{op}: offsets must be non-decreasing end rows between 0 and {count}; got {ends}")
