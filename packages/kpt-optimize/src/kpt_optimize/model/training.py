"""A training step by a recipe."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from kpt_core.errors import InputError
from kpt_optimize.measure import device_of
from kpt_optimize.trial import Example

from .recipe import OptimizedModel, example_on
from .report import OptimizationReport

Loss = Callable[[Any], Any]


@dataclass(slots=True)
class OptimizedTraining:
    """A model, its optimiser and the step that was measured.

    Attributes:
        model: forwards by the recipe; the parameters are those of `model.module`. For a training loop of your own put
            forward and backward inside `model.settings()`.
        optimizer: holds these parameters; None if none was given. Make learning-rate schedulers for this one.
        loss: the loss of a model's output.
        scaler: scales the loss in float16, where gradients underflow; does nothing else.
        report: what was tried, kept, gained and lost.
    """

    model: OptimizedModel
    optimizer: Optimizer | None
    loss: Loss
    scaler: torch.amp.GradScaler
    report: OptimizationReport | None = None

    def step(self, inputs: object, loss: Loss | None = None) -> Tensor:
        """Clear gradients, compute them, apply them if there is an optimizer, and return the loss, detached.

        Args:
            inputs: a tensor, a sequence of arguments or a mapping of keyword arguments for the model.
            loss: of the model's output, a scalar; None takes that of `optimize_for_training`.
        """
        return self.run(example_on(device_of(self.model), inputs), loss)[1].detach()

    def run(self, call: Example, loss: Loss | None = None, *, update: bool = True) -> tuple[Any, Tensor]:
        """Return a step's output and loss; without `update` gradients are left in the parameters, unscaled."""
        with self.model.settings():
            for parameter in self.model.parameters():
                parameter.grad = None
            output = call(self.model)
            value = (loss or self.loss)(output)
            if not isinstance(value, Tensor) or value.numel() != 1:
                shown = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise InputError(f"the loss must be a scalar tensor; got {shown}: pass loss=")
            self.scaler.scale(value).backward()
            if update and self.optimizer is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif self.scaler.is_enabled():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= self.scaler.get_scale()
        return output, value


def scaler_for(model: OptimizedModel, scale: float = 65536.0) -> torch.amp.GradScaler:
    """Return a scaler that is at work for float16 alone."""
    return torch.amp.GradScaler(device_of(model).type, scale, enabled=model.recipe.autocast is torch.float16)


def default_loss(output: Any) -> Tensor:
    """Return the output's own `loss` (Hugging Face models given labels), else its mean square.

    The mean square stands in for a loss to measure with; it's no goal to train for.
    """
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floating:
        raise InputError("the model's output has no floating tensor to make a loss of: pass loss=")
    return torch.stack([leaf.float().square().mean() for leaf in floating]).sum()


def optimizer_for(optimizer: Optimizer, source: nn.Module, target: nn.Module, *, fused: bool = False) -> Optimizer:
    """Return a copy of the optimiser of a model, options and state included, for a copy of the model.

    Parameters are matched by name; `fused` makes it the fused one.

    Raises:
        InputError: a parameter of the optimizer is not in the model, or has no namesake in its copy.
    """
    parameters = dict(target.named_parameters())
    matched: dict[int, Any] = {id(p): parameters[name] for name, p in source.named_parameters() if name in parameters}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in given:
        if id(parameter) not in matched:
            raise InputError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's: make it "
                "from model.parameters()"
            )
    moved = any(parameter.device != matched[id(parameter)].device for parameter in given)
    new: Any = copy.deepcopy(optimizer, matched)
    if fused:
        new._step_supports_amp_scaling = True  # as the constructor sets it
        for group in new.param_groups:
            group.update(fused=True, foreach=None)
    if fused or moved:  # state, step counts among it, goes where the update wants it
        new.load_state_dict(new.state_dict())
    return new  # type: ignore[no-any-return]
