"""CUDA graphs by `torch.cuda.make_graphed_callables`: a call costs one launch instead of one per kernel.

A graph replays the very kernels on the very addresses that it saw, so a call of another form (shapes, dtypes, devices,
plain values) runs uncaptured, with a warning. The tests of this package have no GPU: they simulate torch's function.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from kpt_core.errors import InputError
from kpt_optimize.trial import Example

from .report import OptimizationWarning


def capture(function: Callable[..., Any], sample: Example, *, training: bool) -> Callable[..., Any]:
    """Capture a forward and, for training, its backward.

    For inference later calls leave earlier results alone. For training the function is a module, whose other mode runs
    uncaptured, and results live in fixed places, which the next call overwrites: use them before the next forward.

    Raises:
        InputError: the sample's tensors are elsewhere, or there are none.
        RuntimeError: from the driver, where the function does what can't be captured.
    """
    flat, mode, warned = _Flat(function, sample), getattr(function, "training", None), set[str]()
    captured = _form_of(flat.leaves, flat.spec)
    devices = {tensor.device for tensor in _tensors(flat.leaves)}
    if len(devices) != 1 or any(device.type in ("cpu", "meta") for device in devices):
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise InputError(f"a CUDA graph takes tensors on one accelerator; got {found}: move them there")
    # The tensors that torch is given become the fixed places.
    places = [t.detach().clone().requires_grad_(training and t.requires_grad) for t in _tensors(flat.leaves)]
    of = torch.get_device_module(device := devices.pop())
    with of.device(device), nullcontext() if training else torch.no_grad():
        # Only of a module does torch capture gradients of the parameters.
        make: Any = of.make_graphed_callables
        graphed = make(flat if training else flat.forward, tuple(places), allow_unused_input=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        form = _form_of(leaves, spec)
        if form == captured and getattr(function, "training", None) is mode:
            results = graphed(*_tensors(leaves))
            return flat.output(results if training else [result.clone() for result in results])
        if form != captured and (given := _shown(*form)) not in warned:
            warned.add(given)
            warnings.warn(
                f"the CUDA graph is not replayed, the call runs uncaptured: it is of {given}, captured was "
                f"{_shown(*captured)}; pad the inputs to the captured form, or optimise with a sample of this one",
                OptimizationWarning,
                stacklevel=2,
            )
        return function(*args, **kwargs)

    return call


class _Flat(nn.Module):
    """A function as `make_graphed_callables` takes it: tensors in, tensors out, other values as in the sample."""

    def __init__(self, function: Callable[..., Any], sample: Example) -> None:
        super().__init__()
        self.function = function
        self.leaves, self.spec = tree_flatten((sample.args, dict(sample.kwargs)))
        self._results: tuple[list[Any], TreeSpec]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _filled(self.leaves, self.spec, tensors)
        leaves, spec = tree_flatten(self.function(*args, **kwargs))
        # What is not a tensor comes back as it was; tensors aren't held.
        self._results = [torch.empty(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        return tuple(_tensors(leaves))

    def output(self, tensors: Iterable[Tensor]) -> Any:
        """Return the function's result with these tensors."""
        return _filled(*self._results, tensors)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _filled(leaves: list[Any], spec: TreeSpec, tensors: Iterable[Tensor]) -> Any:
    """Return the tree with other tensors in the places of its own."""
    others = iter(tensors)
    return tree_unflatten([next(others) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _form_of(leaves: list[Any], spec: TreeSpec) -> tuple[TreeSpec, list[Any]]:
    """Return what must be the same in every call of a graph."""
    return spec, [(t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, Tensor) else t for t in leaves]


def _shown(spec: TreeSpec, leaves: list[Any]) -> str:
    def text(shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> str:
        return f"{dtype} {list(shape)} on {device}{' with gradient' if requires_grad else ''}"

    return str(tree_unflatten([text(*leaf) if isinstance(leaf, tuple) else repr(leaf) for leaf in leaves], spec))
