"""How much memory a model will take, before it takes any."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from kpt_core.errors import InputError, UnknownNameError
from kpt_optimize.rewrite import check_model
from kpt_optimize.trial import Example

from .sizes import dense_parts, format_bytes, storage_bytes

#: Attention of CPUs, which torch's counter does not know.
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a step of a model takes.

    Attributes:
        gradients: of all parameters that want one; as the optimiser's state, 0 for inference.
        activations: alive when the forward pass has ended, the outputs among them.
        peak: the most that is alive at one time, all of the above included and what the optimiser's step makes, the
            allocator's rounding not.
    """

    parameters: int
    buffers: int
    inputs: int
    gradients: int
    optimizer_state: int
    activations: int
    peak: int

    def __str__(self) -> str:
        return "\n".join(
            f"{part.replace('_', ' '):16} {format_bytes(count):>12}" for part, count in asdict(self).items()
        )


class LiveStorages(TorchDispatchMode):
    """Add up the storages that ops make, as long as they live, and the operations of products and attention.

    What is `known` is counted elsewhere.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        from torch.utils.flop_counter import flop_registry, sdpa_flop_count  # it imports triton

        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.flops = 0
        self._counts: dict[Any, Callable[..., int]] = flop_registry
        self._attention: Callable[..., int] = sdpa_flop_count
        self._known = {part.untyped_storage()._cdata for tensor in known for part in dense_parts(tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        for storage in [part.untyped_storage() for leaf in made for part in dense_parts(leaf)]:
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.live)
        if func.overloadpacket is _CPU_ATTENTION:
            self.flops += self._attention(*(each.shape for each in args[:3]))
        elif (flops := self._counts.get(func.overloadpacket)) is not None:
            self.flops += flops(*args, **(kwargs or {}), out_val=result)
        return result

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class _Step(nn.Module):
    """Run a model forward and, for training, backward, all within one call: checkpoints read parameters in both."""

    def __init__(self, model: nn.Module, training: bool, tracker: LiveStorages) -> None:
        super().__init__()
        self.model, self.trains, self.tracker = model, training, tracker
        self.activations = 0

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Note what is alive between the two passes."""
        with torch.set_grad_enabled(self.trains):
            outputs = self.model(*args, **kwargs)
        self.activations = self.tracker.live
        if self.trains:
            roots = _roots(outputs, self.model)
            del outputs  # of models that give a loss the scores go, as in a loop that keeps the loss alone
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool = True,
    optimizer: str | OptimizerFactory | None = "adamw",
) -> MemoryEstimate:
    """Estimate the memory of a training or inference step without running it.

    The model runs on fake tensors, which have shapes and lifetimes but no memory: nothing is computed, and parameters,
    gradients, buffers and random state stay as they are. Optimiser state is that of the optimiser's own step on tensors
    without memory, and what its step makes and drops is part of the peak. A mapping with a `loss`, as models of
    transformers give, is differentiated from there. What kernels take inside for themselves is not seen. Operators
    that save other things elsewhere, as dropout and attention do, are estimated for the device on which the model is.
    With `sdpa` models of transformers make a mask of fake inputs that they would not make of real ones: five bytes for
    each query and key of a sequence are too much.

    Source: `torch._subclasses.fake_tensor`, and the idea of `torch.distributed._tools.mem_tracker`.

    Args:
        model: the model, on any device, `meta` too.
        example_inputs: arguments of its forward: a tensor, a tuple of arguments or a dict of keyword arguments.
        training: a forward and a backward pass in training mode; otherwise a forward pass without gradients.
        optimizer: a key of `OPTIMIZERS`, a callable that makes one from parameters, or None; read for training.

    Raises:
        InputError: no module, a model that decides by values of tensors, which fake tensors don't have, or that fails
            on them, an optimiser that does, or for training no output with a gradient.
        UnknownNameError: no such optimiser.
    """
    return estimate_with_flops(model, example_inputs, training, optimizer)[0]


def estimate_with_flops(
    model: nn.Module, example_inputs: Any, training: bool, optimizer: str | OptimizerFactory | None
) -> tuple[MemoryEstimate, int]:
    """Return what `estimate` does, and the floating-point operations of products and attention in the step."""
    check_model(model)
    example = Example.of(example_inputs, "example_inputs")
    name = type(model).__name__
    state_bytes, step_bytes = _optimizer_bytes(model, optimizer) if training and optimizer is not None else (0, 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _training(model, training):
        parameters = {key: mode.from_tensor(tensor) for key, tensor in model.named_parameters()}
        buffers = {key: mode.from_tensor(tensor) for key, tensor in model.named_buffers()}
        args, kwargs = tree_map_only(Tensor, mode.from_tensor, (example.args, dict(example.kwargs)))
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        with LiveStorages([*parameters.values(), *buffers.values(), *given]) as tracker:
            step = _Step(model, training, tracker)
            swapped: dict[str, Tensor] = {f"model.{key}": each for key, each in (parameters | buffers).items()}
            try:
                functional_call(step, swapped, args, kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
                raise InputError(
                    f"estimate: {name} calls {error.func}, which needs the values of tensors, and an estimate has only "
                    "their shapes; measure a step: torch.accelerator.max_memory_allocated()"
                ) from error
            except RuntimeError as error:
                raise InputError(
                    f"estimate: {name} failed on fake tensors, with {shorten(str(error), 200)!r}; if it runs on real "
                    "ones, one of its operators takes fewer dtypes there, as the grouped product of transformers does; "
                    'experts_implementation="kpt" takes all'
                ) from error
        gradients = storage_bytes(p.grad for p in parameters.values() if p.grad is not None)
        sizes = storage_bytes(parameters.values()), storage_bytes(buffers.values()), storage_bytes(given)
    most = max(tracker.peak, gradients + step_bytes)
    found = MemoryEstimate(*sizes, gradients, state_bytes, step.activations, sum(sizes) + state_bytes + most)
    return found, tracker.flops


@contextmanager
def _training(model: nn.Module, mode: bool) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.train(mode)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _roots(outputs: Any, model: nn.Module) -> list[Tensor]:
    """Return what a step differentiates: the loss, or all outputs that have a gradient."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    leaves = tree_iter(outputs if loss is None else loss)
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots and any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"estimate: {type(model).__name__} returned no tensor with a gradient ({type(outputs).__name__}); return "
            "tensors, tuples, lists or dicts of them, or estimate with training=False"
        )
    return roots


def _optimizer_bytes(model: nn.Module, optimizer: str | OptimizerFactory) -> tuple[int, int]:
    """Return the bytes of the optimiser's state, and of what a step makes and drops again."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise UnknownNameError("optimizer", optimizer, OPTIMIZERS, "A callable that makes one is taken too.")
        optimizer = OPTIMIZERS[optimizer]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not wanted:
        return 0, 0
    parameters = [nn.Parameter(torch.empty_like(p, device="meta")) for p in wanted]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    stepped = optimizer(parameters)
    if wanted[0].device.type not in ("cpu", "meta"):  # accelerators update all tensors at once, unless told otherwise
        for group in stepped.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    try:
        stepped.step()
        known = [*parameters, *(leaf for leaf in tree_iter(dict(stepped.state)) if isinstance(leaf, Tensor))]
        with LiveStorages(known) as tracker:
            stepped.step()
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"estimate: {type(stepped).__name__} reads values in its step, which an estimate does not have; "
            "pass optimizer=None and add its state yourself"
        ) from error
    state = storage_bytes(leaf for leaf in tree_iter(dict(stepped.state)) if isinstance(leaf, Tensor))
    return state, tracker.peak
