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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only

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
    captured, captured_text = _form_of(flat.inputs), _shown(flat.inputs)
    devices = {tensor.device for tensor in _tensors(flat.inputs)}
    if len(devices) != 1 or any(device.type in ("cpu", "meta") for device in devices):
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise InputError(f"a CUDA graph takes tensors on one accelerator; got {found}: move them there")
    # The tensors that torch is given become the fixed places.
    places = [t.detach().clone().requires_grad_(training and t.requires_grad) for t in _tensors(flat.inputs)]
    of = torch.get_device_module(device := devices.pop())
    with of.device(device), nullcontext() if training else torch.no_grad():
        # Only of a module does torch capture gradients of the parameters.
        make: Any = of.make_graphed_callables
        graphed = make(flat if training else flat.forward, tuple(places), allow_unused_input=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        form = _form_of((args, kwargs))
        if form == captured and getattr(function, "training", None) is mode:
            results = graphed(*_tensors((args, kwargs)))
            return _filled(flat.results, results if training else [result.clone() for result in results])
        if form != captured and (given := _shown((args, kwargs))) not in warned:
            warned.add(given)
            warnings.warn(
                f"the CUDA graph is not replayed, the call runs uncaptured: it is of {given}, captured was "
                f"{captured_text}; pad the inputs to the captured form, or optimise with a sample of this one",
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
        self.inputs = sample.args, dict(sample.kwargs)
        self.results: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _filled(self.inputs, tensors)
        results = self.function(*args, **kwargs)
        # What is not a tensor comes back as it was; tensors aren't held.
        self.results = tree_map_only(Tensor, lambda _: torch.empty(0), results)
        return tuple(_tensors(results))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _filled(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the tree with other tensors in the places of its own."""
    others = iter(tensors)
    return tree_map_only(Tensor, lambda _: next(others), tree)


def _form_of(tree: Any) -> tuple[TreeSpec, list[Any]]:
    """Return what must be the same in every call of a graph."""
    leaves, spec = tree_flatten(tree)
    return spec, [(t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, Tensor) else t for t in leaves]


def _shown(tree: Any) -> str:
    def text(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        return f"{leaf.dtype} {list(leaf.shape)} on {leaf.device}{' with gradient' if leaf.requires_grad else ''}"

    return str(tree_map(text, tree))
