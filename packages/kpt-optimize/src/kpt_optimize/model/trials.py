"""What a step must show before it is kept: its error, and what it gains."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kpt_optimize.measure import interleaved_times, parameter_bytes, relative_error
from kpt_optimize.trial import Trial, UnsteadyError, repeatable

from .optimized_model import OptimizedModel, prepare
from .recipe import Recipe
from .steps import Situation
from .training import Loss, OptimizedTraining, optimizer_for, restored, scaler_for

Candidate = TypeVar("Candidate")


class RecipeTrial(Trial[Candidate], Protocol[Candidate]):
    """A trial whose candidates are made by recipes."""

    def build(self, recipe: Recipe, *, inplace: bool = False) -> Candidate:
        """A candidate by a recipe; of weights of its own unless `inplace`."""


class InferenceTrial:
    """Candidates are compared by their outputs and timed by a forward.

    Args:
        model: the original, in evaluation mode.
        situation: what the optimisation was asked for.

    Raises:
        InputError: the model does not run on the sample, or not twice the same.
    """

    def __init__(self, model: nn.Module, situation: Situation) -> None:
        self._model = model
        self._situation = situation
        self._sample = situation.sample
        original = OptimizedModel(model, Recipe(), training=False)
        self._expected = repeatable(lambda: self._sample(original), "sample")

    def build(self, recipe: Recipe, *, inplace: bool = False) -> OptimizedModel:
        """The model by a recipe."""
        backend = self._situation.config.compile_backend
        # Nothing to convert: the original's weights serve.
        shared = recipe == Recipe()
        return prepare(self._model, recipe, self._sample, compile_backend=backend, inplace=inplace or shared)

    def error(self, candidate: OptimizedModel) -> float:
        """Of its output, as `max |after - before| / max |before|`."""
        return relative_error(self._sample(candidate), self._expected)

    def budget(self, *, lossless: bool) -> float:
        """The level's, at least what rounding explains where the numerics class stays."""
        return self._situation.budget(self._expected, lossless=lossless)

    def times(self, before: OptimizedModel, after: OptimizedModel) -> Sequence[Sequence[float]]:
        """Seconds of a forward of each, in turn."""
        situation = self._situation
        runs = (lambda: self._sample(before), lambda: self._sample(after))
        return interleaved_times(runs, situation.device, seconds=situation.config.seconds)

    def bytes(self, candidate: OptimizedModel) -> int:
        """Bytes of parameters and buffers."""
        return parameter_bytes(candidate.module)


class TrainingTrial:
    """Candidates are compared by outputs, gradients and the optimiser's update, and timed by a training step.

    Dropout modules are off meanwhile; if outputs still differ from run to run, the model is measured in evaluation
    mode.

    Args:
        model: the original; its flags are put back by the caller.
        situation: what the optimisation was asked for.
        loss: of the model's output.

    Raises:
        InputError: the step does not run on the sample, or not twice the same.
    """

    def __init__(self, model: nn.Module, situation: Situation, loss: Loss) -> None:
        self._model = model
        self._situation = situation
        self._sample = situation.sample
        self._loss = loss
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        self._original = self.build(Recipe())
        try:
            self._expected, self._gradients = repeatable(lambda: self._probe(self._original), "sample")
        except UnsteadyError:
            model.eval()
            self._original = self.build(Recipe())
            self._expected, self._gradients = repeatable(lambda: self._probe(self._original), "sample")

    def build(self, recipe: Recipe, *, inplace: bool = False) -> OptimizedTraining:
        """The training by a recipe."""
        config, optimizer = self._situation.config, self._situation.optimizer
        backend = config.compile_backend
        prepared = prepare(self._model, recipe, self._sample, training=True, compile_backend=backend, inplace=inplace)
        if optimizer is not None and not (inplace and not recipe.fused):
            optimizer = optimizer_for(optimizer, self._model, prepared.module, fused=recipe.fused)
        return OptimizedTraining(prepared, optimizer, self._loss, scaler_for(prepared))

    def error(self, candidate: OptimizedTraining) -> float:
        """The largest of the output's, the gradient's and the update's.

        The output's is `max |after - before| / max |before|`; the gradient's, over all parameters at once, is
        `|after - before| / |before|` in the Euclidean norm; the update's likewise, for the same gradients, where the
        optimiser changed, less what rounding of the parameters explains.
        """
        output, gradients = self._probe(candidate)
        errors = [relative_error(output, self._expected), distance(gradients, self._gradients)]
        if candidate.model.recipe.fused:
            errors.append(self._update_error(candidate))
        return max(errors)

    def budget(self, *, lossless: bool) -> float:
        """The level's, at least what rounding explains where the numerics class stays."""
        return self._situation.budget((self._expected, self._gradients), lossless=lossless)

    def times(self, before: OptimizedTraining, after: OptimizedTraining) -> Sequence[Sequence[float]]:
        """Seconds of a training step of each, in turn; both are put back to where they were."""
        situation = self._situation
        # A step moves the parameters: what is timed is a copy's optimiser, and the weights are put back.
        scratch = [_with_scratch_optimizer(training) for training in (before, after)]
        runs = [lambda training=training: training.run(self._sample) for training in scratch]
        with restored(before.model, after.model):
            return interleaved_times(runs, situation.device, seconds=situation.config.seconds)

    def bytes(self, candidate: OptimizedTraining) -> int:
        """Bytes of parameters and buffers."""
        return parameter_bytes(candidate.model.module)

    def _probe(self, candidate: OptimizedTraining) -> tuple[Any, dict[str, Tensor]]:
        """Output and gradients; a loss that is scaled too much for float16 is scaled by half, as in training."""
        while True:
            with restored(candidate.model):
                output, _ = candidate.run(self._sample, update=False)
                named = candidate.model.module.named_parameters()
                gradients = {name: p.grad for name, p in named if p.grad is not None}
            scale = candidate.scaler.get_scale()
            if scale <= 1 or all(gradient.isfinite().all() for gradient in gradients.values()):
                return output, gradients
            candidate.scaler.update(scale / 2)

    def _update_error(self, candidate: OptimizedTraining) -> float:
        """Of the parameters after one update by the original's gradients."""
        moved: list[dict[str, Tensor]] = []
        for training in (_with_scratch_optimizer(self._original), _with_scratch_optimizer(candidate)):
            with restored(training.model):
                module, optimizer = training.model.module, training.optimizer
                assert optimizer is not None
                start = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
                for name, parameter in module.named_parameters():
                    gradient = self._gradients.get(name)
                    parameter.grad = None if gradient is None else gradient.clone()
                optimizer.step()
                moved.append({name: p.detach().double() - start[name] for name, p in module.named_parameters()})
        unit = max((torch.finfo(p.dtype).eps for p in self._model.parameters() if p.is_floating_point()), default=0.0)
        size, update = norm(start), norm(moved[0])
        return max(distance(moved[1], moved[0]) - unit * size / max(update, 1e-30), 0.0)


def distance(after: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """`|after - before| / |before|` over all tensors, Euclidean; inf where they don't match or aren't finite."""
    if after.keys() != before.keys() or any(after[name].shape != before[name].shape for name in before):
        return math.inf
    difference = norm({name: after[name].double() - before[name].double() for name in before})
    if difference == 0:
        return 0.0
    found = difference / max(norm(before), 1e-30)
    return math.inf if math.isnan(found) else found


def norm(tensors: dict[str, Tensor]) -> float:
    """The Euclidean norm over all tensors."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def _with_scratch_optimizer(training: OptimizedTraining) -> OptimizedTraining:
    """The same training with an optimiser that leaves the real one's state alone."""
    optimizer: Optimizer | None = training.optimizer
    if optimizer is not None:
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        optimizer = copy.deepcopy(optimizer, dict(own))
    return OptimizedTraining(
        training.model, optimizer, training.loss, scaler_for(training.model, training.scaler.get_scale())
    )
