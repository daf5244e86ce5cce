"""The search for a recipe: each step is tried on top of those kept before, and must show its error and its gain."""

import copy
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kpt_optimize.measure import (
    UNSTEADY,
    Load,
    interleaved_times,
    noise_share,
    parameter_bytes,
    relative_error,
)
from kpt_optimize.trial import Example, UnsteadyError, attempt, budget_of, failed, repeatable, setback

from .recipe import Recipe, prepare
from .report import KEPT, NOT_TRIED, ROLLED_BACK, OptimizationReport, OptimizationWarning, StepOutcome
from .steps import STEPS, Situation
from .training import Loss, OptimizedTraining, default_loss, optimizer_for, scaler_for


class RecipeTrial:
    """Candidates made by recipes; without a sample nothing is run.

    For inference outputs are compared and a forward is timed. For training gradients and the optimiser's update are
    compared too and a step is timed; dropout modules are off meanwhile, and if outputs still differ from run to run,
    the model is measured in evaluation mode. The caller puts the model's flags back.

    Raises:
        InputError: the original does not run on the sample, or not twice the same.
    """

    def __init__(self, situation: Situation, loss: Loss | None = None) -> None:
        self._situation, self._model, self._loss = situation, situation.model, loss or default_loss
        self._sample = situation.sample or Example((), {})
        #: What the original gives.
        self._expected: Any = None
        if situation.sample is None:
            return
        for module in self._model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        try:
            self._run_original()
        except UnsteadyError:
            if not self._model.training:
                raise
            self._model.eval()
            self._run_original()

    def build(self, recipe: Recipe) -> OptimizedTraining:
        """Make the model by a recipe, and the optimiser of its parameters."""
        situation, optimizer = self._situation, self._situation.optimizer
        backend = situation.config.compile_backend
        model = prepare(self._model, recipe, self._sample, training=situation.training, compile_backend=backend)
        if optimizer is not None:
            optimizer = optimizer_for(optimizer, self._model, model.module, fused=recipe.fused)
        return OptimizedTraining(model, optimizer, self._loss, scaler_for(model))

    def error(self, candidate: OptimizedTraining) -> float:
        """Return the largest of the output's and, for training, the gradient's and the update's.

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

    def budget(self, *, lossless: bool) -> float:
        """Return the level's budget, at least what rounding explains where the numerics class stays."""
        situation = self._situation
        return budget_of(self._expected, situation.level, situation.config.max_error, lossless=lossless)

    def times(self, before: OptimizedTraining, after: OptimizedTraining) -> Sequence[Sequence[float]]:
        """Time each in turn; parameters and optimisers are put back to where they were."""
        device, seconds, sample = self._situation.device, self._situation.config.seconds, self._sample
        if not self._situation.training:
            return interleaved_times((lambda: sample(before.model), lambda: sample(after.model)), device, seconds)
        scratch = [_scratch(training) for training in (before, after)]
        runs = [lambda training=training: training.run(sample) for training in scratch]
        with _restored(before.model, after.model):
            return interleaved_times(runs, device, seconds)

    def bytes(self, candidate: OptimizedTraining) -> int:
        """Return the bytes of parameters and buffers."""
        return parameter_bytes(candidate.model)

    def _run_original(self) -> None:
        self._original = self.build(Recipe())
        self._expected = repeatable(lambda: self._probe(self._original), "sample")

    def _probe(self, candidate: OptimizedTraining) -> tuple[Any, dict[str, Tensor]]:
        """Return output and gradients; a loss scaled too much for float16 is scaled by half, as in training."""
        if not self._situation.training:
            return self._sample(candidate.model), {}
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
        training, gradients = _scratch(candidate), self._expected[1]
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


def _scratch(training: OptimizedTraining) -> OptimizedTraining:
    """Return the same training with an optimiser and a scaler that leave the real ones' state alone."""
    own: dict[int, Any] = {id(parameter): parameter for parameter in training.model.parameters()}
    scaler = scaler_for(training.model, training.scaler.get_scale())
    return replace(training, optimizer=copy.deepcopy(training.optimizer, own), scaler=scaler)


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


def search(trial: RecipeTrial, situation: Situation) -> tuple[OptimizedTraining, OptimizationReport]:
    """Try every step on top of those kept before; where the result is slower than the original, that is the result."""
    objective, outcomes, lossless = situation.config.objective, list[StepOutcome](), True
    original = best = trial.build(Recipe())
    load, noisy = Load(), False
    for step in [step for step in STEPS if (step.training if situation.training else step.inference)]:
        try:
            proposal = step.propose(situation)
        except Exception as failure:
            outcomes.append(StepOutcome(step.name, "", ROLLED_BACK, _warned(step.name, failed(failure))))
            continue
        if isinstance(proposal, str):
            outcomes.append(StepOutcome(step.name, "", NOT_TRIED, proposal))
            continue
        for setting, recipe in proposal.items():
            build = partial(trial.build, recipe)
            verdict, best = attempt(trial, build, best, objective, lossless=lossless and step.lossless)
            if verdict.failed:
                _warned(step.name, verdict.reason)
            noisy |= verdict.gain is not None and noise_share(verdict.gain, verdict.noise) > UNSTEADY
            status, figures = ROLLED_BACK, (verdict.reason, verdict.gain, verdict.error, verdict.seconds)
            if verdict.kept:
                status, better = KEPT, f", but {setting} is better"
                outcomes = [_back(o, o.reason + better) if o.step == step.name else o for o in outcomes]
                situation, lossless = replace(situation, recipe=recipe), lossless and step.lossless
            outcomes.append(StepOutcome(step.name, setting, status, *figures))
    seconds_before = seconds_after = error = None
    if situation.sample is not None:
        before, after = trial.times(original, best)
        reason = setback((before, after), (trial.bytes(original), trial.bytes(best)), objective, "steps")
        if best is not original and reason is not None:
            outcomes = [_back(outcome, reason) for outcome in outcomes]
            best, situation = original, replace(situation, recipe=Recipe())
        # Two of one kind differ by noise alone.
        seconds_before = statistics.median(before)
        seconds_after = seconds_before if best is original else statistics.median(after)
        error = trial.error(best)
    report = OptimizationReport(
        model=type(situation.model).__name__,
        purpose="training" if situation.training else "inference",
        level=situation.level,
        objective=objective,
        device=str(situation.device),
        outcomes=tuple(outcomes),
        plan=situation.recipe.plan,
        recommendations=(),
        seconds_before=seconds_before,
        seconds_after=seconds_after,
        bytes_before=trial.bytes(original),
        bytes_after=trial.bytes(best),
        error=error,
        note="" if situation.sample is None or objective == "memory" else load.note(noisy=noisy),
    )
    return best, report


def _warned(step: str, reason: str) -> str:
    """Tell of a step that raised at once: it may be a fault of this machine."""
    warnings.warn(f"step {step!r} was rolled back: {reason}", OptimizationWarning, stacklevel=3)
    return reason


def _back(outcome: StepOutcome, reason: str) -> StepOutcome:
    """Roll a step back that was kept."""
    return replace(outcome, status=ROLLED_BACK, reason=reason) if outcome.status == KEPT else outcome
