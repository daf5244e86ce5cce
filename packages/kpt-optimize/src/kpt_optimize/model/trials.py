"""What a recipe must show before it is kept: its error, and what it gains."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kpt_optimize.measure import interleaved_times, parameter_bytes, relative_error
from kpt_optimize.trial import Example, Trial, UnsteadyError, budget_of, repeatable

from .recipe import OptimizedModel, Recipe, prepare
from .steps import Situation
from .training import Loss, OptimizedTraining, optimizer_for, scaler_for

Candidate = TypeVar("Candidate")


class RecipeTrial(Trial[Candidate], Protocol[Candidate]):
    """A trial whose candidates are made by recipes."""

    def build(self, recipe: Recipe, *, inplace: bool = False) -> Candidate:
        """Make a candidate, of weights of its own unless `inplace`."""


class _SampleTrial:
    """What trials on a sample share; without one nothing is run.

    Raises:
        InputError: the original does not run on the sample, or not twice the same.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._model = situation.model
        self._sample = situation.sample or Example((), {})
        #: What the original gives.
        self._expected: Any = None

    def budget(self, *, lossless: bool) -> float:
        """Return the level's budget, at least what rounding explains where the numerics class stays."""
        return budget_of(self._expected, self._situation.level, self._situation.config.max_error, lossless=lossless)

    def _prepared(self, recipe: Recipe, *, inplace: bool) -> OptimizedModel:
        training, backend = self._situation.training, self._situation.config.compile_backend
        return prepare(self._model, recipe, self._sample, training=training, compile_backend=backend, inplace=inplace)


class InferenceTrial(_SampleTrial):
    """Candidates are compared by their outputs and timed by a forward; the model is in evaluation mode."""

    def __init__(self, situation: Situation) -> None:
        super().__init__(situation)
        if situation.sample is not None:
            original = self.build(Recipe())
            self._expected = repeatable(lambda: self._sample(original), "sample")

    def build(self, recipe: Recipe, *, inplace: bool = False) -> OptimizedModel:
        """Make the model by a recipe; with nothing to convert the original's weights serve."""
        return self._prepared(recipe, inplace=inplace or recipe == Recipe())

    def error(self, candidate: OptimizedModel) -> float:
        """Return that of its output, as `max |after - before| / max |before|`."""
        return relative_error(self._sample(candidate), self._expected)

    def times(self, before: OptimizedModel, after: OptimizedModel) -> Sequence[Sequence[float]]:
        """Time a forward of each, in turn."""
        runs = (lambda: self._sample(before), lambda: self._sample(after))
        return interleaved_times(runs, self._situation.device, seconds=self._situation.config.seconds)

    def bytes(self, candidate: OptimizedModel) -> int:
        """Return the bytes of parameters and buffers."""
        return parameter_bytes(candidate)


class TrainingTrial(_SampleTrial):
    """Candidates are compared by outputs, gradients and the optimiser's update, and timed by a training step.

    Dropout modules are off meanwhile; if outputs still differ from run to run, the model is measured in evaluation
    mode. The caller puts the model's flags back.
    """

    def __init__(self, situation: Situation, loss: Loss) -> None:
        super().__init__(situation)
        self._loss = loss
        if situation.sample is None:
            return
        for module in self._model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        try:
            self._run_original()
        except UnsteadyError:
            self._model.eval()
            self._run_original()

    def build(self, recipe: Recipe, *, inplace: bool = False) -> OptimizedTraining:
        """Make the training by a recipe."""
        prepared, optimizer = self._prepared(recipe, inplace=inplace), self._situation.optimizer
        if optimizer is not None and not (inplace and not recipe.fused):
            optimizer = optimizer_for(optimizer, self._model, prepared.module, fused=recipe.fused)
        return OptimizedTraining(prepared, optimizer, self._loss, scaler_for(prepared))

    def error(self, candidate: OptimizedTraining) -> float:
        """Return the largest of the output's, the gradient's and the update's.

        The output's is `max |after - before| / max |before|`; the gradient's, over all parameters at once, is
        `|after - before| / |before|` in the Euclidean norm; the update's likewise, for the same gradients, where the
        optimiser changed, less what rounding of the parameters explains.
        """
        (output, gradients), (wanted, wanted_gradients) = self._probe(candidate), self._expected
        errors = [relative_error(output, wanted), _distance(gradients, wanted_gradients)]
        if candidate.model.recipe.fused:
            update = self._update(self._original)
            parameters = [p for p in self._model.parameters() if p.is_floating_point()]
            rounding = max(torch.finfo(p.dtype).eps for p in parameters) * _norm(parameters)
            unexplained = _distance(self._update(candidate), update) - rounding / max(_norm(update.values()), 1e-30)
            errors.append(max(unexplained, 0.0))
        return max(errors)

    def times(self, before: OptimizedTraining, after: OptimizedTraining) -> Sequence[Sequence[float]]:
        """Time a training step of each, in turn; both are put back to where they were."""
        scratch = [_with_scratch_optimizer(training) for training in (before, after)]
        runs = [lambda training=training: training.run(self._sample) for training in scratch]
        with _restored(before.model, after.model):
            return interleaved_times(runs, self._situation.device, seconds=self._situation.config.seconds)

    def bytes(self, candidate: OptimizedTraining) -> int:
        """Return the bytes of parameters and buffers."""
        return parameter_bytes(candidate.model)

    def _run_original(self) -> None:
        self._original = self.build(Recipe())
        self._expected = repeatable(lambda: self._probe(self._original), "sample")

    def _probe(self, candidate: OptimizedTraining) -> tuple[Any, dict[str, Tensor]]:
        """Return output and gradients; a loss scaled too much for float16 is scaled by half, as in training."""
        while True:
            with _restored(candidate.model):
                output, _ = candidate.run(self._sample, update=False)
                named = candidate.model.module.named_parameters()
                gradients = {name: p.grad for name, p in named if p.grad is not None}
            scale = candidate.scaler.get_scale()
            if scale <= 1 or all(gradient.isfinite().all() for gradient in gradients.values()):
                return output, gradients
            candidate.scaler.update(scale / 2)

    def _update(self, candidate: OptimizedTraining) -> dict[str, Tensor]:
        """Return how one update by the original's gradients moves the parameters."""
        training, gradients = _with_scratch_optimizer(candidate), self._expected[1]
        named = dict(training.model.module.named_parameters())
        assert training.optimizer is not None
        with _restored(training.model):
            start = {name: parameter.detach().double() for name, parameter in named.items()}
            for name, parameter in named.items():
                parameter.grad = gradients[name].clone() if name in gradients else None
            training.optimizer.step()
            return {name: parameter.detach().double() - start[name] for name, parameter in named.items()}


def _distance(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """Return `|after - before| / |before|` over all tensors, Euclidean; inf where they don't match or aren't finite."""
    if after.keys() != before.keys() or any(after[name].shape != before[name].shape for name in before):
        return math.inf
    found = _norm(after[name].double() - before[name].double() for name in before)
    found /= max(_norm(before.values()), 1e-30)
    return math.inf if math.isnan(found) else found


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(tensor.detach().double().square().sum().item() for tensor in tensors))


def _with_scratch_optimizer(training: OptimizedTraining) -> OptimizedTraining:
    """Return the same training with an optimiser and a scaler that leave the real ones' state alone."""
    own = {id(parameter): parameter for parameter in training.model.parameters()}
    optimizer = copy.deepcopy(training.optimizer, dict[int, Any](own))
    return replace(training, optimizer=optimizer, scaler=scaler_for(training.model, training.scaler.get_scale()))


@contextmanager
def _restored(*modules: nn.Module) -> Iterator[None]:
    """Give parameters and buffers the values back that they had, and no gradients."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
                tensor.grad = None
