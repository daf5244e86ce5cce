"""Functions whose GPU work is captured once and replayed.

A CUDA graph replays the very kernels on the very addresses that it saw: a call costs one launch instead of one per
kernel. Inputs are therefore copied to fixed places, results out of fixed places, and a call of another form (shapes,
dtypes, devices, plain values) can't be replayed: it runs uncaptured, with a warning, or is an error.

Not run on a GPU by the tests of this package, which have none: they check the order of the capture's steps, the copies
and the check of the form with a simulated graph.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from kpt_core import InputError

from .call import Call
from .config import OptimizationWarning

#: cuBLAS and cuDNN choose and allocate in the first calls, which a capture can't hold.
WARMUP = 3


@dataclass(frozen=True, slots=True)
class Form:
    """What must be the same in every call of a graph.

    Attributes:
        spec: how the arguments are nested.
        leaves: of each tensor shape, dtype, device and whether it needs a gradient; of anything else its value.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Form":
        """The form of one call."""
        leaves, spec = tree_flatten((args, kwargs))
        return cls(spec, tuple(_described(leaf) for leaf in leaves))

    def difference(self, other: "Form") -> str | None:
        """How `other` differs, as part of a sentence; None where it doesn't."""
        if self.spec != other.spec:
            return f"the arguments are nested as {other.spec}, captured were {self.spec}"
        for index, (captured, given) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if captured != given:
                return f"argument {index} is {_shown(given)}, captured was {_shown(captured)}"
        return None


class Replay:
    """A call that is guarded by the form of its arguments.

    Args:
        replay: takes arguments of the captured form.
        eager: takes any others.
        form: what was captured.
        strict: a call of another form is an `InputError`; else it runs `eager`, and the first of each form warns.
    """

    def __init__(
        self, replay: Callable[..., Any], eager: Callable[..., Any], form: Form, *, strict: bool = False
    ) -> None:
        self.form = form
        self._replay = replay
        self._eager = eager
        self._strict = strict
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graph, or run uncaptured.

        Raises:
            InputError: the arguments have another form, and the guard is strict.
        """
        difference = self.form.difference(Form.of(args, kwargs))
        if difference is None:
            return self._replay(*args, **kwargs)
        if self._strict:
            raise InputError(f"the CUDA graph can't be replayed: {difference}; capture one for this form too")
        if difference not in self._warned:
            self._warned.add(difference)
            warnings.warn(
                f"the CUDA graph is not replayed, the call runs uncaptured: {difference}; pad the inputs to the "
                "captured form, or optimise with a sample of this one",
                OptimizationWarning,
                stacklevel=2,
            )
        return self._eager(*args, **kwargs)


def capture_inference(function: Callable[..., Any], sample: Call, *, strict: bool = False) -> Replay:
    """Capture a function that needs no gradients.

    The sample's tensors are cloned to fixed places; the function runs three times on a side stream and is captured.
    A replay copies the call's tensors there and clones what comes out, so that a later call leaves earlier results
    alone. Plain values are part of the graph, and of its form.

    Args:
        function: reads no tensor's value on the host, and allocates the same each time.
        sample: at least one CUDA tensor, and no tensor elsewhere.
        strict: see `Replay`.

    Raises:
        InputError: a tensor of the sample is not on a CUDA device, or there is none.
        RuntimeError: from CUDA, where the function does what can't be captured.
    """
    device = _device_of(sample)
    form = Form.of(sample.args, dict(sample.kwargs))
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (sample.args, dict(sample.kwargs)))
    places = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    with torch.no_grad(), torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                function(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = function(*args, **kwargs)
    results, spec = tree_flatten(output)

    def replay(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        for place, tensor in zip(places, given, strict=True):
            place.copy_(tensor)
        graph.replay()
        return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in results], spec)

    return Replay(replay, function, form, strict=strict)


def capture_training(module: nn.Module, sample: Call, *, strict: bool = False) -> Replay:
    """Capture a module's forward and backward with `torch.cuda.make_graphed_callables`.

    Results live in fixed places, which the next call overwrites: use an output before the next forward.

    Args:
        module: has no hooks, and no buffer that needs a gradient. It is left as it was.
        sample: positional tensors only, on a CUDA device, each with the `requires_grad` of real calls; they are cloned.
        strict: see `Replay`.

    Raises:
        InputError: the sample has keyword arguments or anything but tensors, or one that is not on a CUDA device.
        RuntimeError: from CUDA, where the module does what can't be captured.
    """
    if (why := not_graphable(sample)) is not None:
        raise InputError(f"a CUDA graph of training can't be captured: {why}")
    device = _device_of(sample)
    eager = module.forward
    own = vars(module).get("forward")
    form = Form.of(sample.args, {})
    # The arguments that torch is given become the fixed places.
    places = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), sample.args)
    # torch replaces the module's `forward` by one that copies arguments into place unchecked: the guard must be first.
    with torch.cuda.device(device):
        torch.cuda.make_graphed_callables(module, places, num_warmup_iters=WARMUP, allow_unused_input=True)
    replay = module.forward
    if own is None:
        vars(module).pop("forward", None)
    else:
        module.forward = own
    return Replay(replay, eager, form, strict=strict)


def not_graphable(sample: Call) -> str | None:
    """Why `torch.cuda.make_graphed_callables` can't take a sample; None if it can."""
    if sample.kwargs:
        return f"it takes positional tensors only; the sample has {', '.join(sorted(sample.kwargs))} by keyword"
    other = next((leaf for leaf in sample.leaves if not isinstance(leaf, Tensor)), None)
    return None if other is None else f"it takes positional tensors only; the sample has {other!r}"


def _device_of(sample: Call) -> torch.device:
    """The CUDA device of the sample's tensors."""
    tensors = [leaf for leaf in sample.leaves if isinstance(leaf, Tensor)]
    elsewhere = {str(tensor.device) for tensor in tensors if tensor.device.type != "cuda"}
    if elsewhere or not tensors:
        found = ", ".join(sorted(elsewhere)) or "none"
        raise InputError(f"a CUDA graph takes tensors on a CUDA device; got {found}: move them there")
    return tensors[0].device


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _shown(described: Any) -> str:
    if isinstance(described, tuple):
        shape, dtype, device, requires_grad = described
        return f"{dtype} {list(shape)} on {device}{' with gradient' if requires_grad else ''}"
    return repr(described)
