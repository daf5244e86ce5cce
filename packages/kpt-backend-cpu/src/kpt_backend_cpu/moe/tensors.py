"""Tensors as the native kernels take them."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kpt_backend_cpu.structures import SCALES_BLOCK, SCALES_K, SCALES_N, SCALES_NONE
from kpt_core import InputError

_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a call with these needs an autograd function around it, which costs 10 microseconds."""
    if transformed():
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work.

    An autograd function without a rule for them raises, where an operator alone would let a derivative be zero.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refusal_of_transforms() -> str | None:
    """Why a call that torch.func or forward-mode differentiation looks into is not for native kernels, or None."""
    return "torch.func or forward-mode differentiation is at work, for which it has no rules" if transformed() else None


def with_whole_rows(x: Tensor) -> Tensor:
    """`x` `[rows, columns]`, copied unless each row is contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def with_whole_columns_or_rows(weight: Tensor) -> Tensor:
    """`weight` `[experts, K, N]`, copied unless K or N is contiguous."""
    return weight if weight.stride(2) == 1 or weight.stride(1) == 1 else weight.contiguous()


def address(x: Tensor | None) -> int:
    """Where `x` begins, 0 for nothing."""
    return 0 if x is None else x.data_ptr()


def rows(x: Tensor | None) -> tuple[int, ...]:
    """`x` `[rows, columns]` with contiguous rows, or nothing: the numbers of `structures.Rows`."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), _DTYPES[x.dtype])


def matrices(weight: Tensor | None, scale: Tensor | None = None) -> tuple[int, ...]:
    """`weight` `[experts, K, N]` with contiguous K or N, and its float32 scales `[experts, a, b]`; or nothing.

    Returns:
        The numbers of `structures.Matrices`.
    """
    if weight is None:
        return (0,) * 10
    place = weight.data_ptr(), *weight.stride(), _DTYPES[weight.dtype]
    if scale is None:
        return *place, SCALES_NONE, 0, 0, 0, 0
    (_, inner, columns), (_, a, b) = weight.shape, scale.shape
    if (a, b) == (1, columns):
        of = SCALES_N
    elif (a, b) == (-(-inner // 128), -(-columns // 128)):
        of = SCALES_BLOCK
    else:
        of = SCALES_K
    return *place, of, scale.data_ptr(), *scale.stride()


def ordered_as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of `weight`'s shape `[experts, K, N]`, K before N in memory where that holds of `weight`."""
    experts, inner, columns = weight.shape
    if weight.stride(1) < weight.stride(2):
        return weight.new_empty((experts, columns, inner), dtype=dtype).mT
    return weight.new_empty((experts, inner, columns), dtype=dtype)


def require_offsets(op: str, offsets: Tensor, count: int) -> Tensor:
    """`offsets` in contiguous memory, if they are end rows of experts that own `count` rows at most.

    Raises:
        InputError: they decrease or end past the last row: kernels would read what is not there.
    """
    ends = offsets.tolist()
    if ends and (ends[0] < 0 or ends[-1] > count or sorted(ends) != ends):
        raise InputError(f"{op}: offsets must be non-decreasing end rows between 0 and {count}; got {ends}")
    return offsets.contiguous()
