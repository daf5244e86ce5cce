"""The tensors among an op's arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kpt_optimize.cases import Arguments


def with_tensors(arguments: Arguments, change: Callable[[str, Tensor], Any]) -> Arguments:
    """Return the arguments with each tensor changed; `change` is told its name too."""
    return {name: change(name, value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors among arguments by their names."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def with_one(arguments: Arguments, name: str, tensor: Tensor) -> Arguments:
    """Return the arguments with another tensor in the place of one."""
    return with_tensors(arguments, lambda each, old: tensor if each == name else old)


def scalable(arguments: Arguments) -> list[str]:
    """Return the floating arguments of more than 8 bits that have elements."""
    return [n for n, t in tensors_of(arguments).items() if t.is_floating_point() and t.dtype.itemsize > 1 and t.numel()]


def parted(arguments: Arguments) -> tuple[Arguments, Arguments]:
    """Return the arguments that are tensors, and the others, which a model would hold as constants."""
    tensors: Arguments = {**tensors_of(arguments)}
    return tensors, {name: value for name, value in arguments.items() if name not in tensors}


def require_addresses(device: torch.device) -> None:
    """Skip a check of memory where tensors tell neither addresses nor sizes of it: XLA decides what lies where."""
    if device.type == "xla":
        pytest.skip("tensors on xla do not tell their memory")


def fresh(tensor: Tensor) -> Tensor:
    """Return the same values in the same layout, in memory of its own."""
    if tensor.device.type == "xla":
        return tensor.clone()
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def cotangent_like(out: Tensor, index: int = 0) -> Tensor:
    """Return a random cotangent for an output: never constant, since a sum would hide what is summed wrongly."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)


def noted_in(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that notes each tensor which it is given, and gives it back."""

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return note
