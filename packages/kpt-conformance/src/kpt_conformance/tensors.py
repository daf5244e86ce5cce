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

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [changed(f"{name}[{place}]", each) for place, each in enumerate(value)]
        return change(name, value) if isinstance(value, Tensor) else value

    return {name: changed(name, value) for name, value in arguments.items()}


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors among arguments, named as `with_tensors` names them."""
    found: dict[str, Tensor] = {}
    with_tensors(arguments, found.__setitem__)
    return found


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
