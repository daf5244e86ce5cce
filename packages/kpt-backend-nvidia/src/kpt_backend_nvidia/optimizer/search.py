"""The search for a recipe: one step after the other, each kept only if it is measured to be better."""

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Generic

from kpt_core import LEVELS, gain_of

from .config import OptimizationWarning
from .recipe import Recipe
from .report import KEPT, NOT_TRIED, ROLLED_BACK, StepOutcome
from .steps import STEPS, Proposal, Situation, Step
from .trials import Candidate, Trial


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


def search(trial: Trial[Candidate], situation: Situation) -> tuple[Candidate, Recipe, list[StepOutcome]]:
    """Try every step on top of those kept before.

    Returns:
        The best candidate, its recipe, and what became of each step.
    """
    recipe, outcomes = situation.recipe, list[StepOutcome]()
    best: Candidate = trial.build(recipe)
    lossless = True
    for step in steps_for(training=situation.training):
        situation = replace(situation, recipe=recipe)
        proposal: Proposal | None = not_tried(situation, step)
        if proposal is None:
            try:
                proposal = step.propose(situation)
            except Exception as failure:
                outcomes.append(StepOutcome(step.name, "", ROLLED_BACK, _failed(step.name, failure)))
                continue
        if isinstance(proposal, str):
            outcomes.append(StepOutcome(step.name, "", NOT_TRIED, proposal))
            continue
        for setting, proposed in proposal.items():
            outcome, best = _attempt(trial, best, proposed, step, setting, situation, lossless=lossless)
            if outcome.status == KEPT:
                outcomes = [_superseded(o, setting) if o.step == step.name else o for o in outcomes]
                recipe, lossless = proposed, lossless and step.lossless
            outcomes.append(outcome)
    return best, recipe, outcomes


def _attempt(
    trial: Trial[Candidate],
    best: Candidate,
    recipe: Recipe,
    step: Step,
    setting: str,
    situation: Situation,
    *,
    lossless: bool,
) -> tuple[StepOutcome, Candidate]:
    """Try one recipe; the candidate is `best` if it is rolled back."""
    start = time.perf_counter()
    try:
        candidate = trial.build(recipe)
        error = trial.error(candidate)
        took = time.perf_counter() - start
        budget = trial.budget(lossless=lossless and step.lossless)
        if error > budget:
            reason = f"error {error:.1e} exceeds the budget of {budget:.1e}"
            return StepOutcome(step.name, setting, ROLLED_BACK, reason, None, error, took), best
        if situation.config.objective == "memory":
            what, gain, noise = "smaller", trial.bytes(best) / max(trial.bytes(candidate), 1), 0.0
        else:
            what, (gain, noise) = "faster", gain_of(*trial.times(best, candidate))
    except Exception as failure:
        reason = _failed(step.name, failure)
        return StepOutcome(
            step.name, setting, ROLLED_BACK, reason, preparation_seconds=time.perf_counter() - start
        ), best
    if gain <= 1 + 2 * noise:
        reason = f"{gain:.2f}x: not {what} by more than the noise ({2 * noise:.1%})"
        return StepOutcome(step.name, setting, ROLLED_BACK, reason, gain, error, took), best
    return StepOutcome(step.name, setting, KEPT, f"{gain:.2f}x {what}", gain, error, took), candidate


def _failed(step: str, failure: Exception) -> str:
    """The reason of a step that raised, which is told at once too: it may be a fault of this machine."""
    # Compilers' messages have pages; a reason is a row of a table.
    reason = shorten(f"it failed: {type(failure).__name__}: {failure}", 300, placeholder="...")
    warnings.warn(f"step {step!r} was rolled back: {reason}", OptimizationWarning, stacklevel=2)
    return reason


def _superseded(outcome: StepOutcome, setting: str) -> StepOutcome:
    if outcome.status != KEPT:
        return outcome
    return replace(outcome, status=ROLLED_BACK, reason=f"{outcome.reason}, but {setting} is better")


def settle(
    trial: Trial[Candidate], situation: Situation, found: tuple[Candidate, Recipe, list[StepOutcome]]
) -> Result[Candidate]:
    """Compare what was found with the original; where it is slower, the original is the result."""
    best, recipe, outcomes = found
    original = trial.build(Recipe())
    before, after = trial.times(original, best)
    if recipe == Recipe():
        after = before  # two of one kind, whose difference is noise
    gain, noise = gain_of(before, after)
    if situation.config.objective == "latency" and recipe != Recipe() and gain < 1 - 2 * noise:
        reason = f"with the kept steps together the model was slower, {gain:.2f}x"
        outcomes = [replace(o, status=ROLLED_BACK, reason=reason) if o.status == KEPT else o for o in outcomes]
        best, recipe, after = original, Recipe(), before
    return Result(
        best=best,
        recipe=recipe,
        outcomes=outcomes,
        seconds_before=statistics.median(before),
        seconds_after=statistics.median(after),
        bytes_before=trial.bytes(original),
        bytes_after=trial.bytes(best),
    )
