"""Bytes: of tensors, of the allocator's segments, and as text."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MIB = 1 << 20


def format_bytes(count: int) -> str:
    """Write `count` bytes in the largest binary unit that leaves at least one, as in `1.50 GiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", _MIB), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def segment_bytes(nbytes: int) -> int:
    """Return what PyTorch's CUDA allocator takes from the device when no block of its cache holds `nbytes`.

    Requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, greater ones are rounded up to
    2 MiB (c10/core/AllocatorConfig.h).
    """
    if _MIB < nbytes < 10 * _MIB:
        return 20 * _MIB
    return -(-nbytes // (2 * _MIB)) * 2 * _MIB


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that `tensor` is made of: itself, or those inside a wrapper or a sparse tensor."""
    wrapper: object = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._values(), tensor._indices())
    elif tensor.layout is torch.strided:
        yield tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up what `tensors` keep alive: whole storages, shared ones once."""
    used = [part.untyped_storage() for tensor in tensors for part in dense_parts(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in used}.values())


def model_bytes(model: torch.nn.Module) -> int:
    """Add up the storages of parameters, their gradients and buffers."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return storage_bytes([*model.parameters(), *gradients, *model.buffers()])
