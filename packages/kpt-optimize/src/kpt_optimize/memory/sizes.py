"""Bytes: of tensors, of the allocator's segments, and as text."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kpt_core.errors import InputError

_KIB, _MIB = 1 << 10, 1 << 20


def format_bytes(count: int) -> str:
    """`count` bytes in the largest binary unit that leaves at least one, as in `1.50 GiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", _MIB), ("KiB", _KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def tensor_sizes(shape: int | Iterable[int]) -> tuple[int, ...]:
    """`shape` as a tuple.

    Raises:
        InputError: a size that is no integer, or negative.
    """
    sizes: tuple[Any, ...] = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InputError(f"shape must be integers of at least 0; got {size!r} in {shape!r}")
    return sizes


def tensor_bytes(shape: int | Iterable[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor.

    Raises:
        InputError: a bad shape, or no dtype.
    """
    wanted: object = dtype
    if not isinstance(wanted, torch.dtype):
        raise InputError(f"dtype must be a torch.dtype, as in torch.bfloat16; got {dtype!r}")
    return math.prod(tensor_sizes(shape)) * dtype.itemsize


def segment_bytes(nbytes: int) -> int:
    """Bytes that PyTorch's CUDA allocator takes from the device when no block of its cache holds `nbytes`.

    Requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, greater ones are rounded up to
    2 MiB (c10/core/AllocatorConfig.h).
    """
    if nbytes == 0:
        return 0
    if nbytes <= _MIB:
        return 2 * _MIB
    if nbytes < 10 * _MIB:
        return 20 * _MIB
    return -(-nbytes // (2 * _MIB)) * 2 * _MIB


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The strided tensors that `tensor` is made of: itself, or those inside a wrapper or a sparse tensor."""
    wrapper: object = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield tensor._values()
        yield tensor._indices()
    elif tensor.layout is torch.strided:
        yield tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that `tensors` keep alive: whole storages, shared ones once."""
    used = [part.untyped_storage() for tensor in tensors for part in dense_parts(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in used}.values())


def model_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Parameters, their gradients and buffers, each once."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
