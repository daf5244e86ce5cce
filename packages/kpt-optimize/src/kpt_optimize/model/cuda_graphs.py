"""Functions whose GPU work is captured once and replayed: a call costs one launch instead of one per kernel.

A CUDA graph replays the very kernels on the very addresses that it saw, so a call of another form (shapes, dtypes,
devices, plain values) runs uncaptured, with a warning.

Source: `torch.cuda.make_graphed_callables`. Not run on a GPU by the tests of this package, which have none: they check
the copies and the form with that function simulated.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from kpt_core.errors import InputError
from kpt_optimize.trial import Example

from .config import OptimizationWarning


def capture(function: Callable[..., Any], sample: Example, *, training: bool) -> Callable[..., Any]:
    """Capture a forward and, for training, its backward.

    For inference later calls leave earlier results alone. For training results live in fixed places, which the next
    call overwrites: use an output before the next forward.

    Args:
        function: reads no tensor's value on the host, and allocates the same each time. For training a module, whose
            other mode runs uncaptured.
        sample: at least one tensor on an accelerator, and none elsewhere; for training each with the `requires_grad`
            of real calls. Plain values are part of the graph, and of its form.
        training: whether to capture the backward too.

    Raises:
        InputError: a tensor of the sample is not on the accelerator, or there is none.
        RuntimeError: from the driver, where the function does what can't be captured.
    """
    device, mode = _device_of(sample), getattr(function, "training", None)
    captured, warned, flat = _form(sample.args, dict(sample.kwargs)), set[str](), _Flat(function, sample)
    # The tensors that torch is given become the fixed places.
    places = [t.detach().clone().requires_grad_(training and t.requires_grad) for t in _tensors(flat.leaves)]
    of = torch.get_device_module(device)
    with of.device(device), nullcontext() if training else torch.no_grad():
        # Without the parameters of the module torch captures no gradients of them.
        graphed: Any = of.make_graphed_callables(
            flat if training else flat.forward, tuple(places), allow_unused_input=True
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        form = _form(args, kwargs)
        if form == captured and getattr(function, "training", None) is mode:
            results = graphed(*_tensors(tree_leaves((args, kwargs))))
            return flat.output(results if training else [result.clone() for result in results])
        given = _shown(form)
        if form != captured and given not in warned:
            warned.add(given)
            warnings.warn(
                f"the CUDA graph is not replayed, the call runs uncaptured: it is of {given}, captured was "
                f"{_shown(captured)}; pad the inputs to the captured form, or optimise with a sample of this one",
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
        self.leaves, self._spec = tree_flatten((sample.args, dict(sample.kwargs)))
        self._results: list[Any] = []
        self._results_spec: TreeSpec | None = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = tree_unflatten(_filled(self.leaves, tensors), self._spec)
        results, self._results_spec = tree_flatten(self.function(*args, **kwargs))
        self._results = [torch.empty(0) if isinstance(result, Tensor) else result for result in results]
        return tuple(_tensors(results))

    def output(self, tensors: Any) -> Any:
        """The function's result with these tensors."""
        assert self._results_spec is not None
        return tree_unflatten(_filled(self._results, tensors), self._results_spec)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _filled(leaves: list[Any], tensors: Any) -> list[Any]:
    """Leaves with other tensors in the places of theirs."""
    others = iter(tensors)
    return [next(others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _device_of(sample: Example) -> torch.device:
    """Return the accelerator of the sample's tensors."""
    devices = {tensor.device for tensor in _tensors(tree_leaves((sample.args, dict(sample.kwargs))))}
    if len(devices) != 1 or any(device.type in ("cpu", "meta") for device in devices):
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise InputError(f"a CUDA graph takes tensors on one accelerator; got {found}: move them there")
    return devices.pop()


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TreeSpec, list[Any]]:
    """What must be the same in every call of a graph: the nesting, what tensors are like, and the other values."""
    leaves, spec = tree_flatten((args, kwargs))
    described = [
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return spec, described


def _shown(form: tuple[TreeSpec, list[Any]]) -> str:
    def text(leaf: Any) -> str:
        if not isinstance(leaf, tuple):
            return repr(leaf)
        shape, dtype, device, requires_grad = leaf
        return f"{dtype} {list(shape)} on {device}{' with gradient' if requires_grad else ''}"

    return str(tree_unflatten([text(leaf) for leaf in form[1]], form[0]))
