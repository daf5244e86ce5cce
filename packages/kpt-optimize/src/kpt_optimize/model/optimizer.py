"""`ModelOptimizer`: find what pays for a model on a device by trying it."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from kpt_core.errors import InputError, UnknownNameError
from kpt_optimize.accelerator.backend import AcceleratorBackend
from kpt_optimize.accelerator.devices import Peaks
from kpt_optimize.measure import device_of, parameter_bytes
from kpt_optimize.rewrite import check_level, check_model
from kpt_optimize.trial import Example

from .config import OptimizationWarning, OptimizerConfig
from .optimized_model import OptimizedModel, example_on
from .recipe import Recipe
from .recommendations import Recommendation, profile, recommend
from .report import NOT_TRIED, OptimizationReport, StepOutcome
from .search import Result, not_tried, search, steps_for
from .steps import STEPS, Situation
from .training import Loss, OptimizedTraining, default_loss, optimizer_for, scaler_for
from .trials import InferenceTrial, TrainingTrial


@dataclass(frozen=True, slots=True)
class OptimizedInference:
    """A model for inference, and how it came about.

    Attributes:
        model: in evaluation mode, and without gradients. Its module, with the usual parameters, is `model.module`.
        report: what was tried, kept, gained and lost.
    """

    model: OptimizedModel
    report: OptimizationReport


class ModelOptimizer:
    """Optimise a model for a device, as far as a level allows; a vendor's optimiser names its `backend`.

    Every step is tried on the sample inputs on top of the steps kept before: its result is compared with the
    original's, the two are timed in turn, and it is kept only if it is within the error budget and better by more than
    the noise.
    First come the rewrites of `kpt_core.optimize`, module by module; then steps for the whole model:

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
        level: as given.
        device: as given.
        config: as given, or the defaults.
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
        self.device = None if device is None else self._present(torch.device(device))
        self.config = config or OptimizerConfig()
        self.report: OptimizationReport | None = None
        names = [step.name for step in STEPS]
        for name in sorted(self.config.skip):
            if name not in names:
                raise UnknownNameError("step", name, names)

    def optimize_for_inference(
        self, model: nn.Module, sample_inputs: object = None, *, inplace: bool = False
    ) -> OptimizedInference:
        """Find what makes a forward faster, or the model smaller.

        Without sample inputs nothing can be measured, so no step is tried: the model is put into evaluation mode, runs
        without gradients, and the report recommends.

        Args:
            model: deep-copied, and left as it is, unless `inplace`.
            sample_inputs: a tensor, a sequence of arguments or a mapping of keyword arguments, as the model will get.
                The model runs them many times, so it must give the same output each time: no cache that grows.
            inplace: convert the model itself.

        Raises:
            InputError: no model, or the sample does not run, or not twice the same.
        """
        working, device = self._working(model, inplace=inplace)
        with _flags_of_failure(working):
            working.eval()
            if sample_inputs is None:
                prepared = OptimizedModel(working, Recipe(), training=False)
                return OptimizedInference(prepared, self._unmeasured(working, device, training=False))
            call = example_on(device, sample_inputs)
            situation = self._situation(working, device, call, training=False)
            trial = InferenceTrial(working, situation)
            result = search(trial, situation)
            error = trial.error(result.best)
            found = recommend(working, device, profile(working, call, device), peaks=self._peaks(device))
            report = self._report(situation, result, found, error)
            best = trial.build(result.recipe, inplace=True) if inplace else result.best
        return OptimizedInference(best, report)

    def optimize_for_training(
        self,
        model: nn.Module,
        sample_inputs: object = None,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        *,
        inplace: bool = False,
    ) -> OptimizedTraining:
        """Find what makes a training step faster; outputs, gradients and the optimiser's update are compared.

        Args:
            model: deep-copied, and left as it is, unless `inplace`.
            sample_inputs: see `optimize_for_inference`.
            loss: gives a scalar of the model's output. None takes the output's own `loss`, as Hugging Face models have
                it, or the mean square of the output to measure with.
            optimizer: of this model's parameters; the result's has the same options and state over the result's
                parameters. Left as it is unless `inplace`. None measures forward and backward alone.
            inplace: convert the model itself and, unless it is to be fused, use the optimizer itself.

        Raises:
            InputError: no model, an objective other than latency, an optimizer of other parameters, or the sample does
                not run, or not twice the same.
        """
        if self.config.objective != "latency":
            raise InputError(
                f"training is measured by its time: the objective must be 'latency', got {self.config.objective!r}"
            )
        working, device = self._working(model, inplace=inplace)
        if optimizer is not None and not inplace:
            optimizer = optimizer_for(optimizer, model, working)
        loss = loss or default_loss
        with _flags_of_failure(working):
            # A frozen norm of a model in training mode stays as it is.
            if not working.training:
                working.train()
            flags = {name: module.training for name, module in working.named_modules()}
            if sample_inputs is None:
                prepared = OptimizedModel(working, Recipe(), training=True)
                report = self._unmeasured(working, device, training=True, optimizer=optimizer)
                return OptimizedTraining(prepared, optimizer, loss, scaler_for(prepared), report)
            call = example_on(device, sample_inputs)
            situation = self._situation(working, device, call, training=True, optimizer=optimizer)
            trial = TrainingTrial(working, situation, loss)
            result = search(trial, situation)
            best, error = result.best, trial.error(result.best)
            working.eval()
            found = recommend(working, device, profile(working, call, device), optimizer, self._peaks(device))
            best.report = self._report(situation, result, found, error)
            _set_flags(working, flags)
            # A graph is of the dropout that it was captured with, which was none.
            if inplace or result.recipe.cuda_graph:
                best = trial.build(result.recipe, inplace=inplace)
                best.report = self.report
            else:
                _set_flags(best.model.module, flags)
                best.model.training = best.model.module.training
        return best

    def recommend(
        self, model: nn.Module, sample_inputs: object = None, *, optimizer: Optimizer | None = None
    ) -> tuple[Recommendation, ...]:
        """Say what may be done for speed, and which figure of the model tells so. Nothing is changed.

        Args:
            model: looked at; with sample inputs it runs three times, in evaluation mode.
            sample_inputs: see `optimize_for_inference`; without them nothing is said of what depends on a forward.
            optimizer: of the model's training.

        Raises:
            InputError: no model, or it does not run on the sample.
        """
        check_model(model)
        device = device_of(model)
        flags = {name: module.training for name, module in model.named_modules()}
        model.eval()
        try:
            found = None if sample_inputs is None else profile(model, example_on(device, sample_inputs), device)
        finally:
            _set_flags(model, flags)
        return recommend(model, device, found, optimizer, self._peaks(device))

    def _present(self, device: torch.device) -> torch.device:
        mine = self.backend is not None and device.type in self.backend.device_types
        if mine and self.backend is not None and (why := self.backend.unavailable()) is not None:
            raise InputError(f"device {str(device)!r} can't be used: {why}")
        return device

    def _situation(
        self,
        model: nn.Module,
        device: torch.device,
        sample: Example,
        *,
        training: bool,
        optimizer: Optimizer | None = None,
    ) -> Situation:
        backend, missing = self.backend, f"needs an accelerator; the model is on {device}"
        capabilities = frozenset[str]()
        if backend is not None and device.type in backend.device_types:
            missing, capabilities = backend.unavailable() or "", backend.capabilities(device)
        elif backend is not None:
            missing = f"needs a device of type {backend.device_types[0]}; the model is on {device}"
        return Situation(
            model,
            Recipe(),
            device,
            sample,
            training,
            self.level,
            self.config,
            optimizer,
            missing or None,
            capabilities,
        )

    def _peaks(self, device: torch.device) -> Peaks | None:
        backend = self.backend
        if backend is None or device.type not in backend.device_types or backend.unavailable() is not None:
            return None
        return backend.device_info(device, live=False).peaks

    def _working(self, model: nn.Module, *, inplace: bool) -> tuple[nn.Module, torch.device]:
        """The module to convert, and where it is."""
        check_model(model)
        working = model if inplace else copy.deepcopy(model)
        if self.device is not None:
            working = working.to(self.device)
        return working, device_of(working)

    def _unmeasured(
        self, model: nn.Module, device: torch.device, *, training: bool, optimizer: Optimizer | None = None
    ) -> OptimizationReport:
        """The report of an optimisation without sample inputs, and a warning that there was none."""
        warnings.warn(
            "no step was tried: without sample inputs nothing can be measured; pass them",
            OptimizationWarning,
            stacklevel=3,
        )
        situation = self._situation(model, device, Example((), {}), training=training, optimizer=optimizer)
        outcomes = [
            StepOutcome(step.name, "", NOT_TRIED, not_tried(situation, step) or "needs sample inputs to be measured on")
            for step in steps_for(training=training)
        ]
        size = parameter_bytes(model)
        result: Result[None] = Result(None, Recipe(), outcomes, None, None, size, size)
        return self._report(situation, result, recommend(model, device, None, optimizer, self._peaks(device)), None)

    def _report(
        self,
        situation: Situation,
        result: Result[Any],
        recommendations: tuple[Recommendation, ...],
        error: float | None,
    ) -> OptimizationReport:
        self.report = OptimizationReport(
            model=type(situation.model).__name__,
            purpose="training" if situation.training else "inference",
            level=self.level,
            objective=self.config.objective,
            device=str(situation.device),
            outcomes=tuple(result.outcomes),
            plan=result.recipe.plan,
            recommendations=recommendations,
            seconds_before=result.seconds_before,
            seconds_after=result.seconds_after,
            bytes_before=result.bytes_before,
            bytes_after=result.bytes_after,
            error=error,
        )
        return self.report


def _set_flags(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Set each module's training flag by its name; a module that a rewrite added gets that of the one it is in."""
    for name, module in model.named_modules():
        while name not in flags:
            name = name.rpartition(".")[0]
        module.training = flags[name]


@contextmanager
def _flags_of_failure(model: nn.Module) -> Iterator[None]:
    """Put the training flags back if the block fails."""
    flags = {name: module.training for name, module in model.named_modules()}
    try:
        yield
    except BaseException:
        _set_flags(model, flags)
        raise
