"""The call of a model that an optimisation is measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kpt_core import InputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `model(...)`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: object, device: torch.device) -> "Call":
        """The call with a tensor, a sequence of arguments or a mapping of keyword arguments, moved to `device`.

        Raises:
            InputError: it is none of them.
        """
        if isinstance(inputs, Tensor):
            inputs = (inputs,)
        inputs = tree_map_only(Tensor, lambda t: t.to(device), inputs)
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        if isinstance(inputs, Sequence) and not isinstance(inputs, str):
            return cls(tuple(inputs), {})
        raise InputError(
            "sample inputs must be a tensor, a sequence of arguments or a mapping of keyword arguments for the model; "
            f"got {type(inputs).__name__}"
        )

    def __call__(self, function: Any) -> Any:
        """The result of `function` for these arguments."""
        return function(*self.args, **self.kwargs)

    @property
    def leaves(self) -> list[Any]:
        """Every tensor and plain value in the arguments."""
        return tree_leaves((self.args, dict(self.kwargs)))


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter or buffer lives."""
    tensor = next(iter((*model.parameters(), *model.buffers())), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def cast(tree: T, source: torch.dtype, target: torch.dtype) -> T:
    """Tensors of dtype `source` anywhere in `tree`, converted; the rest as it is."""
    return tree_map_only(Tensor, lambda t: t.to(target) if t.dtype is source else t, tree)  # type: ignore[no-any-return]
