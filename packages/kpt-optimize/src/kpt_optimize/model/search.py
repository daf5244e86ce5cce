"""The search for a recipe: one step after the other, each tried on top of those kept before."""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from kpt_optimize.rewrite import LEVELS
from kpt_optimize.trial import attempt, failed, setback

from .config import OptimizationWarning
from .recipe import Recipe
from .report import KEPT, NOT_TRIED, ROLLED_BACK, StepOutcome
from .steps import STEPS, Proposal, Situation, Step
from .trials import Candidate, RecipeTrial


@dataclass(frozen=True, slots=True)
class Result(Generic[Candidate]):
    """What a search found, compared with the original.

    Attributes:
        best: the candidate.
        recipe: what it was made by.
        outcomes: of the steps.
        seconds_before: median seconds of the original; None if nothing was measured.
        seconds_after: of the best.
        bytes_before: parameters and buffers of the original.
        bytes_after: of the best.
    """

    best: Candidate
    recipe: Recipe
    outcomes: Sequence[StepOutcome]
    seconds_before: float | None
    seconds_after: float | None
    bytes_before: int
    bytes_after: int


def not_tried(situation: Situation, step: Step) -> str | None:
    """Why a step is out of the question, whatever the model is."""
    if step.name in situation.config.skip:
        return "skipped, as the configuration says"
    if LEVELS.index(step.level) > LEVELS.index(situation.level):
        return f"belongs to level {step.level!r}; this is {situation.level!r}"
    if situation.config.objective not in step.objectives:
        return f"changes nothing of the objective {situation.config.objective!r}"
    return None


def steps_for(*, training: bool) -> list[Step]:
    """The steps of a purpose."""
    return [step for step in STEPS if (step.training if training else step.inference)]


def search(trial: RecipeTrial[Candidate], situation: Situation) -> Result[Candidate]:
    """Try every step on top of those kept before; where the result is slower than the original, that is the result."""
    recipe, outcomes = situation.recipe, list[StepOutcome]()
    best, lossless = trial.build(recipe), True
    for step in steps_for(training=situation.training):
        situation = replace(situation, recipe=recipe)
        proposal: Proposal | None = not_tried(situation, step)
        if proposal is None:
            try:
                proposal = step.propose(situation)
            except Exception as failure:
                reason = failed(failure)
                _warn(step, reason)
                outcomes.append(StepOutcome(step.name, "", ROLLED_BACK, reason))
                continue
        if isinstance(proposal, str):
            outcomes.append(StepOutcome(step.name, "", NOT_TRIED, proposal))
            continue
        for setting, proposed in proposal.items():
            build, objective = partial(trial.build, proposed), situation.config.objective
            verdict, best = attempt(trial, build, best, objective, lossless=lossless and step.lossless)
            if verdict.failed:
                _warn(step, verdict.reason)
            if verdict.kept:
                outcomes = [_superseded(o, setting) if o.step == step.name else o for o in outcomes]
                recipe, lossless = proposed, lossless and step.lossless
            status = KEPT if verdict.kept else ROLLED_BACK
            outcomes.append(
                StepOutcome(step.name, setting, status, verdict.reason, verdict.gain, verdict.error, verdict.seconds)
            )
    return _settle(trial, situation, best, recipe, outcomes)


def _warn(step: Step, reason: str) -> None:
    """Tell of a step that raised at once: it may be a fault of this machine."""
    warnings.warn(f"step {step.name!r} was rolled back: {reason}", OptimizationWarning, stacklevel=2)


def _superseded(outcome: StepOutcome, setting: str) -> StepOutcome:
    if outcome.status != KEPT:
        return outcome
    return replace(outcome, status=ROLLED_BACK, reason=f"{outcome.reason}, but {setting} is better")


def _settle(
    trial: RecipeTrial[Candidate], situation: Situation, best: Candidate, recipe: Recipe, outcomes: list[StepOutcome]
) -> Result[Candidate]:
    """Compare what was found with the original."""
    original = trial.build(Recipe())
    before, after = trial.times(original, best)
    sizes = trial.bytes(original), trial.bytes(best)
    if recipe == Recipe():
        after = before  # two of one kind, whose difference is noise
    elif (reason := setback((before, after), sizes, situation.config.objective, "steps")) is not None:
        outcomes = [replace(o, status=ROLLED_BACK, reason=reason) if o.status == KEPT else o for o in outcomes]
        best, recipe, after, sizes = original, Recipe(), before, (sizes[0], sizes[0])
    return Result(best, recipe, outcomes, statistics.median(before), statistics.median(after), *sizes)
