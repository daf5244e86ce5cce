"""A module of experts seen as one that has a single expert."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kpt_core import InputError


def stacked_parameters(network: nn.Module, num_experts: int) -> dict[str, nn.Parameter]:
    """The parameters of a module and its children that have a slice for each expert, by their paths.

    Those are all parameters that a module has itself, where each is `[num_experts, ...]` and one of them a matrix
    `[num_experts, outputs, inputs]`; the modules without such a matrix are shared by all experts.

    Raises:
        InputError: one module has parameters of both kinds, or there are none.
    """
    found: dict[str, nn.Parameter] = {}
    for path, module in network.named_modules():
        if not _is_stacked(module, num_experts):
            continue
        own = dict(module.named_parameters(prefix=path, recurse=False))
        for name, parameter in own.items():
            if parameter.dim() < 2 or parameter.shape[0] != num_experts:
                raise InputError(
                    f"{type(network).__name__} cannot be offloaded: beside matrices of {num_experts} experts "
                    f"{type(module).__name__} has {name} {list(parameter.shape)}, which has no slice for each"
                )
        if next(module.buffers(recurse=False), None) is not None:
            raise InputError(f"{type(network).__name__} cannot be offloaded: {type(module).__name__} has buffers")
        found |= own
    if not found:
        raise InputError(
            f"{type(network).__name__} cannot be offloaded: it has no parameter [{num_experts}, outputs, inputs]"
        )
    return found


def shared_children(network: nn.Module, num_experts: int) -> dict[str, nn.Module | None]:
    """The children that have nothing for each expert.

    Raises:
        InputError: a child that has something for each expert has parameters or buffers that it has not.
    """
    shared = {}
    for name, child in network._modules.items():
        modules = [] if child is None else list(child.modules())
        if not any(_is_stacked(module, num_experts) for module in modules):
            shared[name] = child
        elif any(module._parameters or module._buffers for module in modules if not _is_stacked(module, num_experts)):
            raise InputError(
                f"{type(network).__name__} cannot be offloaded: {name} has weights for each expert and others"
            )
    return shared


class OneExpert:
    """A twin of a module of experts that has one expert alone, whose weights are put in for a while.

    Modules shared by all experts are those of the original. Not for several threads at a time.

    Args:
        network: the original; it stays as it is.
        num_experts: number of its experts.
        stacked: paths of the parameters that have a slice for each of them.
    """

    def __init__(self, network: nn.Module, num_experts: int, stacked: Iterable[str]) -> None:
        self._num_experts = num_experts
        self._stacked = tuple(stacked)
        self._twins: list[nn.Module] = []
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self.module: Any = self._twin(network, "")

    @contextmanager
    def holding(self, parameters: Mapping[str, Tensor], training: bool) -> Iterator[Any]:
        """The twin with these parameters, `[1, ...]` each, by their paths."""
        for twin in self._twins:
            twin.training = training
        try:
            for path, tensor in parameters.items():
                registry, name = self._places[path]
                registry[name] = tensor
            yield self.module
        finally:
            for registry, name in self._places.values():
                registry[name] = None

    def _twin(self, module: nn.Module, prefix: str) -> nn.Module:
        twin = copy.copy(module)
        self._twins.append(twin)
        own = vars(twin)
        own["_parameters"] = module._parameters.copy()
        own["_modules"] = module._modules.copy()
        if getattr(module, "num_experts", None) == self._num_experts:
            own["num_experts"] = 1
        for name in module._parameters:
            if prefix + name in self._stacked:
                self._places[prefix + name] = own["_parameters"], name
        for name, child in module._modules.items():
            path = f"{prefix}{name}."
            if child is not None and any(parameter.startswith(path) for parameter in self._stacked):
                own["_modules"][name] = self._twin(child, path)
        return twin


def _is_stacked(module: nn.Module, num_experts: int) -> bool:
    """Whether a module has, itself, a matrix for each expert."""
    own = module.parameters(recurse=False)
    return any(parameter.dim() > 2 and parameter.shape[0] == num_experts for parameter in own)
