"""The search for a recipe: one step after the other, each tried on top of those kept before."""

import statistics
import warnings
from dataclasses import replace
from functools import partial

from kpt_optimize.trial import attempt, failed, setback

from .recipe import Recipe
from .report import KEPT, NOT_TRIED, ROLLED_BACK, OptimizationReport, OptimizationWarning, StepOutcome
from .steps import STEPS, Situation
from .trials import Candidate, RecipeTrial


def search(trial: RecipeTrial[Candidate], situation: Situation) -> tuple[Candidate, Recipe, OptimizationReport]:
    """Try every step on top of those kept before; where the result is slower than the original, that is the result."""
    objective, outcomes, lossless = situation.config.objective, list[StepOutcome](), True
    original = best = trial.build(Recipe())
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
            status, figures = ROLLED_BACK, (verdict.reason, verdict.gain, verdict.error, verdict.seconds)
            if verdict.kept:
                status, better = KEPT, f", but {setting} is better"
                outcomes = [_back(o, o.reason + better) if o.step == step.name else o for o in outcomes]
                situation, lossless = replace(situation, recipe=recipe), lossless and step.lossless
            outcomes.append(StepOutcome(step.name, setting, status, *figures))
    recipe, sizes = situation.recipe, (trial.bytes(original), trial.bytes(best))
    seconds: tuple[float | None, float | None] = None, None
    if situation.sample is not None:
        before, after = trial.times(original, best)
        if recipe == Recipe():
            after = before  # two of one kind, whose difference is noise
        elif (reason := setback((before, after), sizes, objective, "steps")) is not None:
            outcomes = [_back(outcome, reason) for outcome in outcomes]
            best, recipe, after, sizes = original, Recipe(), before, (sizes[0], sizes[0])
        seconds = statistics.median(before), statistics.median(after)
    return (
        best,
        recipe,
        OptimizationReport(
            type(situation.model).__name__,
            "training" if situation.training else "inference",
            situation.level,
            objective,
            str(situation.device),
            tuple(outcomes),
            recipe.plan,
            (),
            *seconds,
            *sizes,
            None if situation.sample is None else trial.error(best),
        ),
    )


def _warned(step: str, reason: str) -> str:
    """Tell of a step that raised at once: it may be a fault of this machine."""
    warnings.warn(f"step {step!r} was rolled back: {reason}", OptimizationWarning, stacklevel=3)
    return reason


def _back(outcome: StepOutcome, reason: str) -> StepOutcome:
    """Roll a step back that was kept."""
    return replace(outcome, status=ROLLED_BACK, reason=reason) if outcome.status == KEPT else outcome
