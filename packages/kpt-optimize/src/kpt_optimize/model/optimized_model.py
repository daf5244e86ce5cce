"""A model with a recipe in force."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kpt_core.errors import InputError
from kpt_optimize.measure import device_of
from kpt_optimize.optimize import apply_plan
from kpt_optimize.padding import pad_model
from kpt_optimize.trial import Example

from .cuda_graphs import capture
from .recipe import CAPTURING_MODES, Recipe

T = TypeVar("T")

#: Rank of the inputs that a memory format is for.
RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}


class OptimizedModel(nn.Module):
    """A model that runs by a recipe. Its module, with the usual names of parameters, is `module`.

    For inference it runs in `torch.no_grad`, its results own their memory, and floating results have the dtype of the
    original's. `state_dict` has the names of `module` after `module.`: save `prepared.module`.

    Args:
        module: what is run; `prepare` has converted its weights.
        recipe: what is in force.
        training: whether gradients are wanted.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, *, training: bool) -> None:
        super().__init__()
        self.module = module
        self.recipe = recipe
        self.training = module.training
        self._for_training = training
        self._body = _Body(module, recipe) if _needs_body(recipe) else module
        self._run: Callable[..., Any] = self._body

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_body", "_run"):  # not children: the module would be listed twice, under their names too
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def compile(self, backend: str | Callable[..., Any] = "inductor", *args: Any, **kwargs: Any) -> None:
        """Compile by `torch.compile` in the recipe's mode; modes are Inductor's."""
        options: dict[str, Any] = {"backend": backend, **kwargs}
        if backend == "inductor":
            options["mode"] = self.recipe.compile_mode
        # torch 2.13: each compiled model counts its own recompilations. Without it, all that share a `forward` do.
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            options["isolate_recompiles"] = True
        self._run = torch.compile(self._body, *args, **options)

    def capture(self, sample: Example) -> None:
        """Capture the run on `sample` in a CUDA graph."""
        with self.settings():
            self._run = capture(self._run, sample, training=self._for_training)

    def train(self, mode: bool = True) -> "OptimizedModel":
        """Set training or evaluation mode.

        Raises:
            InputError: training mode, where the model was prepared for inference.
        """
        if mode and not self._for_training:
            raise InputError("the model was prepared for inference: train the original")
        super().train(mode)
        # What was captured in training mode is replayed in it alone.
        if self._body is not self.module:
            self._body.training = mode
        return self

    @contextmanager
    def settings(self) -> Iterator[None]:
        """The recipe's settings of the process, for this block: put a backward of your own inside too."""
        if not self.recipe.tf32:
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments."""
        captures = self.recipe.compile_mode in CAPTURING_MODES
        with self.settings(), nullcontext() if self._for_training else torch.no_grad():
            if captures:
                torch.compiler.cudagraph_mark_step_begin()
            output = self._run(*args, **kwargs)
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
        recipe = self.recipe
        if recipe.weights is not None:
            args, kwargs = cast((args, kwargs), torch.float32, recipe.weights)
        if recipe.memory_format is not None:
            args, kwargs = tree_map_only(Tensor, self._formatted, (args, kwargs))
        if recipe.autocast is None:
            output = self.module(*args, **kwargs)
        else:
            # A graph can't hold autocast's cache of converted weights.
            with torch.autocast(self.device_type, recipe.autocast, cache_enabled=not recipe.cuda_graph):
                output = self.module(*args, **kwargs)
        return output if recipe.weights is None else cast(output, recipe.weights, torch.float32)

    def _formatted(self, tensor: Tensor) -> Tensor:
        form = self.recipe.memory_format
        assert form is not None
        return tensor.contiguous(memory_format=form) if tensor.dim() == RANK[form] else tensor


def example_on(device: torch.device, inputs: object) -> Example:
    """The call of a model with these inputs, moved to a device.

    Raises:
        InputError: they are no tensor, sequence or mapping.
    """
    example = Example.of(inputs, "sample inputs")
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (example.args, dict(example.kwargs)))
    return Example(args, kwargs)


def cast(tree: T, source: torch.dtype, target: torch.dtype) -> T:
    """Tensors of dtype `source` anywhere in `tree`, converted; the rest as it is."""
    found: T = tree_map_only(Tensor, lambda t: t.to(target) if t.dtype is source else t, tree)
    return found


def prepare(
    model: nn.Module,
    recipe: Recipe,
    sample: Example,
    *,
    training: bool = False,
    compile_backend: str | Callable[..., Any] = "inductor",
    inplace: bool = False,
) -> OptimizedModel:
    """Make a model that runs by a recipe.

    Args:
        model: left as it is unless `inplace`; its copy has weights of its own.
        recipe: what to do.
        sample: the call that a CUDA graph is captured on.
        training: whether gradients are wanted.
        compile_backend: handed to `torch.compile`.
        inplace: convert the weights of `model` itself.
    """
    module = model if inplace else copy.deepcopy(model)
    if recipe.plan is not None:
        module = apply_plan(module, recipe.plan, inplace=True).model
    if recipe.memory_format is not None:
        for parameter in module.parameters():
            if parameter.dim() == RANK[recipe.memory_format]:
                parameter.data = parameter.data.contiguous(memory_format=recipe.memory_format)
    if recipe.weights is not None:
        convert_weights(module, recipe.weights)
    if recipe.padded:
        pad_model(module, recipe.autocast)
    prepared = OptimizedModel(module, recipe, training=training)
    if recipe.compile_mode is not None:
        prepared.compile(compile_backend)
    if recipe.cuda_graph:
        prepared.capture(sample)
    return prepared


def convert_weights(module: nn.Module, dtype: torch.dtype) -> None:
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


def _needs_body(recipe: Recipe) -> bool:
    return recipe.weights is not None or recipe.autocast is not None or recipe.memory_format is not None
