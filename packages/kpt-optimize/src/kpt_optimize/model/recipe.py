"""What the kept steps do to a model, as plain data, and the model that runs by it."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kpt_core.errors import InputError
from kpt_optimize.measure import device_of
from kpt_optimize.optimize import apply_plan
from kpt_optimize.padding import pad_model
from kpt_optimize.plan import Plan
from kpt_optimize.trial import Example

from .cuda_graphs import capture

#: The modes in which Inductor captures CUDA graphs of its own.
CAPTURING_MODES = ("reduce-overhead", "max-autotune")
#: Memory formats by the rank of what they are for.
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The kept steps: `memory_format` is for convolutions, `padded` for linear layers, `fused` for the optimiser.

    Float32 weights and inputs are converted to the dtype `weights`.
    """

    plan: Plan | None = None
    memory_format: torch.memory_format | None = None
    padded: bool = False
    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tf32: bool = False
    compile_mode: str | None = None
    cuda_graph: bool = False
    fused: bool = False


class OptimizedModel(nn.Module):
    """A model that runs by a recipe. Its module, with the usual names of parameters, is `module`.

    For inference it runs in `torch.no_grad`, its results own their memory, and floating results have the dtype of the
    original's. `state_dict` has the names of `module` after `module.`: save `prepared.module`.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, *, training: bool) -> None:
        super().__init__()
        self.module = module
        self.recipe = recipe
        self.training = module.training
        self._for_training = training
        converts = any((recipe.weights, recipe.autocast, recipe.memory_format))
        # In lists, or torch would take them for children, and list the parameters under their names too.
        self._body: list[nn.Module] = [_Body(module, recipe) if converts else module]
        self._run: list[Callable[..., Any]] = [*self._body]

    def train(self, mode: bool = True) -> "OptimizedModel":
        """Set training or evaluation mode.

        Raises:
            InputError: training mode, where the model was prepared for inference.
        """
        if mode and not self._for_training:
            raise InputError("the model was prepared for inference: train the original")
        super().train(mode)
        self._body[0].training = mode  # a graph that was captured in one mode is replayed in it alone
        return self

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Apply the recipe's settings of the process inside the block: a backward of your own belongs inside too."""
        before = torch.get_float32_matmul_precision() if self.recipe.tf32 else None
        if before is not None:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if before is not None:
                torch.set_float32_matmul_precision(before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module gives for these arguments."""
        captures = self.recipe.compile_mode in CAPTURING_MODES
        with self.settings(), nullcontext() if self._for_training else torch.no_grad():
            if captures:
                torch.compiler.cudagraph_mark_step_begin()
            output = self._run[0](*args, **kwargs)
            if captures and not self._for_training:
                output = tree_map_only(Tensor, torch.clone, output)
        return output


class _Body(nn.Module):
    """What a recipe does to inputs and outputs; a part of what is compiled and captured."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.module = module
        self.recipe = recipe
        self.training = module.training
        self.device_type = device_of(module).type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe, weights = self.recipe, self.recipe.weights
        if weights is not None:
            args, kwargs = _cast((args, kwargs), torch.float32, weights)
        if (form := recipe.memory_format) is not None:
            args, kwargs = tree_map_only(Tensor, lambda tensor: _formatted(tensor, form), (args, kwargs))
        # A graph can't hold autocast's cache of converted weights.
        cached, kind = not recipe.cuda_graph, self.device_type
        with torch.autocast(kind, recipe.autocast, cache_enabled=cached) if recipe.autocast else nullcontext():
            output = self.module(*args, **kwargs)
        return output if weights is None else _cast(output, weights, torch.float32)


def example_on(device: torch.device, inputs: object) -> Example:
    """Return the call of a model with these inputs, moved to a device.

    Raises:
        InputError: they are no tensor, sequence or mapping.
    """
    example = Example.of(inputs, "sample inputs")
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (example.args, dict(example.kwargs)))
    return Example(args, kwargs)


def prepare(
    model: nn.Module,
    recipe: Recipe,
    sample: Example,
    *,
    training: bool = False,
    compile_backend: str | Callable[..., Any] = "inductor",
) -> OptimizedModel:
    """Make a model that runs by a recipe, of weights of its own where it converts them or is to train.

    A CUDA graph is captured on the sample.
    """
    module = copy.deepcopy(model) if training or recipe != Recipe() else model
    if recipe.plan is not None:
        module = apply_plan(module, recipe.plan, inplace=True).model
    if recipe.memory_format is not None:
        for parameter in module.parameters():
            parameter.data = _formatted(parameter.data, recipe.memory_format)
    if recipe.weights is not None:
        _convert_weights(module, recipe.weights)
    if recipe.padded:
        pad_model(module, recipe.autocast)
    prepared = OptimizedModel(module, recipe, training=training)
    (run,) = prepared._run
    if recipe.compile_mode is not None:
        options: dict[str, Any] = {"mode": recipe.compile_mode} if compile_backend == "inductor" else {}
        # torch 2.13: each compiled model counts its own recompilations. Without it, all that share a `forward` do.
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            options["isolate_recompiles"] = True
        run = torch.compile(run, backend=compile_backend, **options)
    if recipe.cuda_graph:
        with prepared.settings():
            run = capture(run, sample, training=training)
    prepared._run = [run]
    return prepared


def _convert_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert float32 parameters and persistent buffers in place.

    Buffers that aren't saved are tables that the model computes (rotary frequencies): rounded, they would be wrong at
    positions that no sample reaches.
    """
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if parameter.dtype is torch.float32:
                parameter.data = parameter.data.to(dtype)
                parameter.grad = None
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.dtype is torch.float32 and name not in child._non_persistent_buffers_set:
                child._buffers[name] = buffer.to(dtype)


def _formatted(tensor: Tensor, form: torch.memory_format) -> Tensor:
    return tensor.contiguous(memory_format=form) if FORMATS.get(tensor.dim()) is form else tensor


def _cast(tree: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Convert tensors of dtype `source` anywhere in `tree`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(target) if tensor.dtype is source else tensor, tree)
