"""Tensors as the native kernels take them: memory that holds what it says, in a layout that they read."""

from collections.abc import Collection
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kpt_backend_cpu.structures import SCALES_BLOCK, SCALES_K, SCALES_N, SCALES_NONE
from kpt_core import Call, InputError

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}

#: Without memory a tensor begins at 0, or where its offset says; at such an address its storage is asked too.
LOW = 1 << 40
_NO_TENSORS = frozenset({type(None), bool, int, float, str, tuple})


def readable(op: str, name: str, x: Tensor, *, whole: bool = False) -> Tensor:
    """`x`, or a copy that kernels can read.

    Args:
        op: what an error names.
        name: of `x`.
        x: any strides; matrices `[experts, a, b]` stay as they are if a or b is contiguous, `[rows, columns]` if each
            row is.
        whole: copy `[rows, columns]` also if there is something between the rows.

    Returns:
        What has memory of its own: numbers that PyTorch negates when they are read and zeros without memory are copied.

    Raises:
        InputError: the memory of `x` was freed.
    """
    if x.data_ptr() >= LOW and x.is_contiguous() and not x.is_neg():
        return x
    if x._is_zerotensor():
        return torch.zeros_like(x)
    if x.data_ptr() == x.storage_offset() * x.itemsize and x.numel() > 0:
        raise InputError(
            f"{op}: {name} {list(x.shape)} has no memory: its storage was freed (untyped_storage().resize_(0)), as "
            "FSDP does with parameters that are not in use; gather it before the call (unshard(), summon_full_params())"
        )
    x = x.resolve_neg()
    return x.contiguous() if whole or 1 not in x.stride()[1:] else x


def in_memory(*tensors: Tensor) -> bool:
    """Tell whether each has memory of its own that holds what it says; where one may not, `readable` does more."""
    return all(x.data_ptr() >= LOW and not x.is_neg() for x in tensors)


def readable_call(op: str, call: Call, whole: Collection[str] = ()) -> Call:
    """`call` with each of its tensors `readable`; those that are named are made `whole`."""
    for x in call:
        # As in `readable`, here without a call for each; whether a number is a tensor takes longest to find out.
        if (type(x) not in _NO_TENSORS and isinstance(x, Tensor)) and (
            x.data_ptr() < LOW or not x.is_contiguous() or x.is_neg()
        ):
            break
    else:
        return call
    tensors = {name: x for name, x in zip(call._fields, call, strict=True) if isinstance(x, Tensor)}
    found = {name: readable(op, name, x, whole=name in whole) for name, x in tensors.items()}
    changed = {name: x for name, x in found.items() if x is not tensors[name]}
    return call._replace(**changed) if changed else call


def in_float32(call: Call, *names: str) -> Call:
    """`call` with scales of float64 rounded to float32."""
    wide = {name: x for name in names if (x := getattr(call, name)) is not None and x.dtype is torch.float64}
    return call._replace(**{name: x.float() for name, x in wide.items()}) if wide else call


def address(x: Tensor | None) -> int:
    """Where `x` begins, 0 for nothing."""
    return 0 if x is None else x.data_ptr()


def rows(x: Tensor | None) -> tuple[int, ...]:
    """`x` `[rows, columns]` with contiguous rows, or nothing: the numbers of `structures.Rows`."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride()[0], DTYPES[x.dtype])


_AS_THEY_ARE: Any = itemgetter(0, 1, 2)
_EXCHANGED: Any = itemgetter(0, 2, 1)


def matrices(weight: Tensor | None, scale: Tensor | None = None, *, by_output: bool = False) -> tuple[int, ...]:
    """`weight` `[experts, K, N]` with contiguous K or N, and its float32 scales; or nothing.

    Args:
        weight: the matrices.
        scale: `[experts, N]`, or `[experts, a, b]` with 1 or all of K and N, or one for each block of 128.
        by_output: they are `[experts, N, K]`, and scales `[experts, b, a]`.

    Returns:
        The numbers of `structures.Matrices`.
    """
    if weight is None:
        return (0,) * 10
    of = _EXCHANGED if by_output else _AS_THEY_ARE
    place = weight.data_ptr(), *of(weight.stride()), DTYPES[weight.dtype]
    if scale is None:
        return *place, SCALES_NONE, 0, 0, 0, 0
    if scale.dim() == 2:
        stride_e, stride_n = scale.stride()
        return *place, SCALES_N, scale.data_ptr(), stride_e, 0, stride_n
    (_, inner, columns), (_, a, b) = of(weight.shape), of(scale.shape)
    if (a, b) == (1, columns):
        kind = SCALES_N
    else:
        kind = SCALES_BLOCK if (a, b) == (-(-inner // 128), -(-columns // 128)) else SCALES_K
    return *place, kind, scale.data_ptr(), *of(scale.stride())


def empty_as(x: Tensor) -> Tensor:
    """An empty tensor of `x`'s shape and dtype, contiguous, or its last two dimensions exchanged where x's are."""
    if x.dim() == 3 and x.stride()[1] < x.stride()[2]:
        return torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT
    return torch.empty_like(x, memory_format=torch.contiguous_format)
