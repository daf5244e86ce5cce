"""`ModelOptimizer`: find what pays for a model on a device by trying it."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from kpt_core.contract import Capability
from kpt_core.errors import InputError, UnknownNameError
from kpt_optimize.devices.backend import AcceleratorBackend
from kpt_optimize.measure import device_of
from kpt_optimize.rewrite import check_level, check_model

from .recipe import OptimizedModel, example_on
from .recommendations import recommend
from .report import OptimizationReport, OptimizationWarning, Recommendation
from .steps import STEPS, OptimizerConfig, Situation
from .training import Loss, OptimizedTraining, optimizer_for
from .trials import RecipeTrial, search


@dataclass(frozen=True, slots=True)
class OptimizedInference:
    """A model in evaluation mode, without gradients, and how it came about; `model.module` has the usual parameters."""

    model: OptimizedModel
    report: OptimizationReport


class ModelOptimizer:
    """Optimise a model for a device, as far as a level allows; a vendor's optimiser names its `backend`.

    Every step is tried on the sample inputs on top of the steps kept before: its result is compared with the
    original's, the two are timed in turn, and it is kept only if it is within the error budget and better by more than
    the noise. Without sample inputs no step is tried, and the report recommends.
    First come the rewrites of `kpt_optimize.optimize`, module by module; then steps for the whole model:

    - `conservative` (same numerics class): `rewrites`, `channels_last`, `padding` (inference), `compile` in mode
      `default`, `fused_optimizer` (training).
    - `balanced`: also `tf32`, `mixed_precision` (weights for inference, autocast for training); `compile` in mode
      `max-autotune-no-cudagraphs`.
    - `aggressive`: also `cuda_graph`; `compile` in modes `reduce-overhead` and `max-autotune`, the better of the two.

    Off the accelerator the steps that need it are reported as not tried, and the others are tried there.
    A prepared CUDA graph serves inputs of the sample's form; others run uncaptured, with a warning.

    Args:
        level: `conservative`, `balanced` or `aggressive`.
        device: where the model is to run; None for where it is.
        config: everything else.

    Attributes:
        report: of the last optimisation; None before.

    Raises:
        UnknownNameError: no such level, or no such step in `config.skip`.
        InputError: the device is not there.
    """

    backend: ClassVar[AcceleratorBackend | None] = None

    def __init__(
        self,
        level: str = "balanced",
        *,
        device: str | torch.device | None = None,
        config: OptimizerConfig | None = None,
    ) -> None:
        self.level = check_level(level)
        self.device = None if device is None else torch.device(device)
        self.config = config or OptimizerConfig()
        self.report: OptimizationReport | None = None
        asked = self.backend if self.device and self.backend and self.device.type in self.backend.device_types else None
        if asked is not None and (why := asked.unavailable()) is not None:
            raise InputError(f"device {str(device)!r} can't be used: {why}")
        names = [step.name for step in STEPS]
        for name in sorted(self.config.skip.difference(names)):
            raise UnknownNameError("step", name, names)

    def optimize_for_inference(self, model: nn.Module, sample_inputs: object = None) -> OptimizedInference:
        """Find what makes a forward faster, or the model smaller.

        Args:
            model: deep-copied, and left as it is.
            sample_inputs: a tensor, a sequence of arguments or a mapping of keyword arguments, as the model will get.
                The model runs them many times, so it must give the same output each time: no cache that grows.

        Raises:
            InputError: no model, or the sample does not run, or not twice the same.
        """
        situation = self._situation(self._copied(model).eval(), sample_inputs)
        best, report = self._search(RecipeTrial(situation), situation)
        return OptimizedInference(best.model, report)

    def optimize_for_training(
        self,
        model: nn.Module,
        sample_inputs: object = None,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
    ) -> OptimizedTraining:
        """Find what makes a training step faster; outputs, gradients and the optimiser's update are compared.

        Args:
            model: deep-copied, and left as it is.
            sample_inputs: see `optimize_for_inference`.
            loss: gives a scalar of the model's output. None takes the output's own `loss`, as Hugging Face models have
                it, or the mean square of the output to measure with.
            optimizer: of this model's parameters, left as it is; the result's has the same options and state over the
                result's parameters. None measures forward and backward alone.

        Raises:
            InputError: no model, an objective other than latency, an optimizer of other parameters, or the sample does
                not run, or not twice the same.
        """
        if self.config.objective != "latency":
            raise InputError(
                f"training is measured by its time: the objective must be 'latency', got {self.config.objective!r}"
            )
        working = self._copied(model)
        if optimizer is not None:
            optimizer = optimizer_for(optimizer, model, working)
        if not working.training:  # a frozen norm of a model in training mode stays as it is
            working.train()
        flags = {name: module.training for name, module in working.named_modules()}
        situation = self._situation(working, sample_inputs, optimizer, training=True)
        trial = RecipeTrial(situation, loss)
        best, report = self._search(trial, situation)
        if best.model.recipe.cuda_graph:  # a graph is of the dropout that it was captured with, which was none
            _set_flags(working, flags)
            best = trial.build(best.model.recipe)
        _set_flags(best.model.module, flags)
        best.model.training, best.report = True, report
        return best

    def recommend(
        self, model: nn.Module, sample_inputs: object = None, *, optimizer: Optimizer | None = None
    ) -> tuple[Recommendation, ...]:
        """Say what may be done for speed, and which figure of the model tells so. Nothing is changed.

        With sample inputs the model runs three times, in evaluation mode, to count what a forward does.

        Raises:
            InputError: no model, or it does not run on the sample.
        """
        check_model(model)
        return recommend(self._situation(model, sample_inputs, optimizer))

    def _copied(self, model: nn.Module) -> nn.Module:
        """Return a copy where it is to run."""
        check_model(model)
        copied = copy.deepcopy(model)
        return copied if self.device is None else copied.to(self.device)

    def _situation(
        self, model: nn.Module, inputs: object, optimizer: Optimizer | None = None, *, training: bool = False
    ) -> Situation:
        device, backend = device_of(model), self.backend
        missing: str | None = f"needs an accelerator; the model is on {device}"
        capabilities, peaks = frozenset[Capability](), None
        if backend is not None and device.type not in backend.device_types:
            missing = f"needs a device of type {backend.device_types[0]}; the model is on {device}"
        elif backend is not None and (missing := backend.unavailable()) is None:
            capabilities, peaks = backend.capabilities(device), backend.device_info(device, live=False).peaks
        return Situation(
            model=model,
            device=device,
            sample=None if inputs is None else example_on(device, inputs),
            level=self.level,
            config=self.config,
            training=training,
            optimizer=optimizer,
            no_accelerator=missing,
            capabilities=capabilities,
            peaks=peaks,
        )

    def _search(self, trial: RecipeTrial, situation: Situation) -> tuple[OptimizedTraining, OptimizationReport]:
        if situation.sample is None:
            told = "no step was tried: without sample inputs nothing can be measured; pass them"
            warnings.warn(told, OptimizationWarning, stacklevel=3)
        best, report = search(trial, situation)
        self.report = replace(report, recommendations=recommend(situation))
        return best, self.report


def _set_flags(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Set each module's training flag by its name; a module that a rewrite added gets that of the one it is in."""
    for name, module in model.named_modules():
        while name not in flags:
            name = name.rpartition(".")[0]
        module.training = flags[name]
