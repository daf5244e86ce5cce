"""The tensors among an op's arguments, those in lists too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kpt_core.cases import Arguments


def with_tensors(arguments: Arguments, change: Callable[[str, Tensor], Any]) -> Arguments:
    """The arguments with each tensor changed.

    Args:
        arguments: of an op.
        change: is told a tensor's name (in a list also its place, as in `caches[1]`) and gives what replaces it.
    """
    return {name: _changed(name, value, change) for name, value in arguments.items()}


def _changed(name: str, value: Any, change: Callable[[str, Tensor], Any]) -> Any:
    # No function inside the other: one that calls itself there is a cycle, which would keep the tensors for a while.
    if isinstance(value, list | tuple):
        return [_changed(f"{name}[{place}]", each, change) for place, each in enumerate(value)]
    return change(name, value) if isinstance(value, Tensor) else value


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors among arguments, named as `with_tensors` names them."""
    found: dict[str, Tensor] = {}
    with_tensors(arguments, found.__setitem__)
    return found


def with_one(arguments: Arguments, name: str, tensor: Tensor) -> Arguments:
    """The arguments with another tensor in the place of one."""
    return with_tensors(arguments, lambda each, old: tensor if each == name else old)


def scalable(arguments: Arguments) -> list[str]:
    """The floating arguments of more than 8 bits that have elements."""
    return [n for n, t in tensors_of(arguments).items() if t.is_floating_point() and t.dtype.itemsize > 1 and t.numel()]


def parted(arguments: Arguments) -> tuple[Arguments, Arguments]:
    """The arguments that are tensors or lists of them, and the others, which a model would hold as constants."""
    tensors = {name: value for name, value in arguments.items() if tensors_of({name: value})}
    return tensors, {name: value for name, value in arguments.items() if name not in tensors}


def fresh(tensor: Tensor) -> Tensor:
    """The same values in the same layout, in memory of its own."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def cotangent_like(out: Tensor, index: int = 0) -> Tensor:
    """A random cotangent for an output: never constant, since a sum would hide what is summed wrongly."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)


def noted_in(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that notes each tensor which it is given, and gives it back."""

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return note
