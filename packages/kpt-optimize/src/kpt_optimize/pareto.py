"""`pareto`: of versions of modules, the choice that gains most within an error budget, found by what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import nn

from .attempt import Task
from .budgets import rising
from .changes import Changes
from .measure import Load
from .optimize import conclude
from .plan import Budget, Plan, PlanEntry


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """One version of a module, that was tried.

    Attributes:
        entry: of the plan.
        before, after: the module, and what takes its place.
        bytes, seconds: that it saves; seconds of a call.
        gain: of the two what the objective asks for.
        error: of the model's output with this version alone; infinite where no budget would do.
    """

    entry: PlanEntry
    before: nn.Module
    after: nn.Module
    bytes: int
    seconds: float
    gain: float
    error: float

    @property
    def cost(self) -> float:
        """Return the squared error, of which those of different modules add; a little where none could be measured."""
        return max(self.error**2, 1e-30)


def front_of(versions: Sequence[Version]) -> list[Version]:
    """Order steps from nothing to most gain, by what each gains for its squared error, the best first.

    A step changes a module, or takes the place of an earlier version of it. After each no other choice is predicted to
    gain as much for a smaller error, but for what lies between two steps: these are the corners of the convex hull of
    all choices (the multiple-choice knapsack's relaxation: Sinha and Zoltners, Operations Research 27(3), 1979).
    """
    steps: list[tuple[float, Version]] = []
    for name in dict.fromkeys(version.entry.module for version in versions):
        gain = cost = 0.0
        rest = [version for version in versions if version.entry.module == name and version.gain > 0]
        while rest:  # versions that are best at some price
            best = max(rest, key=lambda version: ((version.gain - gain) / (version.cost - cost), version.gain))
            steps.append(((best.gain - gain) / (best.cost - cost), best))
            gain, cost = best.gain, best.cost
            rest = [version for version in rest if version.gain > gain and version.cost > cost]
    return [version for _, version in sorted(steps, key=lambda step: -step[0])]


def in_force(steps: Sequence[Version]) -> tuple[Version, ...]:
    """Return each module's version after the steps."""
    return tuple({step.entry.module: step for step in steps}.values())


def pareto(
    model: nn.Module,
    versions: Sequence[Version],
    measure: Callable[[Sequence[Version]], float],
    run: Callable[[], object],
    task: Task,
    load: Load,
) -> tuple[Plan, list[Version], int]:
    """Find by bisection the most steps of the front whose error is within the budget, and judge the whole model.

    Args:
        model: in evaluation mode; it is left as it was.
        versions: of which those whose entries are kept may be chosen.
        measure: returns the error of the model's output with some of them; infinite where no budget would do.
        run: runs the model on its example.
        task: what was asked for, with a budget.
        load: of the machine since the first was tried.

    Returns:
        The plan, whose budgets are the larger ones that were measured; the front, and how many of its steps are taken.
    """
    budget = task.max_error or 0.0
    steps = front_of([version for version in versions if version.entry.kept])
    errors = {0: 0.0}
    chosen, above, count = 0, len(steps) + 1, len(steps)
    while above - chosen > 1:
        errors[count] = measure(in_force(steps[:count]))
        chosen, above = (count, above) if errors[count] <= budget else (chosen, count)
        count = (chosen + above) // 2
    changes, kept, entries = Changes(model), in_force(steps[:chosen]), []
    try:
        for version in versions:
            entry = version.entry
            if version in kept:
                changes.swap(entry.rewrite, entry.module, version.after)
            elif entry.kept:
                reason = f"{entry.reason}, and others gain more for the error that the budget allows"
                entry = replace(entry, kept=False, reason=reason)
            entries.append(entry)
        asked: dict[str, Any] = {"level": task.level, "objective": task.objective, "budget": budget, "load": load}
        plan = conclude(changes, entries, run, error=errors[chosen], **asked)
    finally:
        changes.revert()
    if plan.kept or not steps:  # else more of it would not pay either
        over = {version.error: version.entry.module for version in versions if budget < version.error < inf}
        total = len({*over.values(), *(step.entry.module for step in steps)})
        reached = {n: error for n, error in sorted(errors.items()) if budget < error < inf}
        found = [Budget(error, len(in_force(steps[:n])), total) for n, error in reached.items()]
        plan = replace(plan, budgets=rising(found if steps or not over else [Budget(min(over), 1, total)]))
    return plan, steps, chosen if plan.kept else 0
