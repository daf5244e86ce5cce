"""How far larger error budgets would reach, measured on the model: `larger_budgets`."""

import math
from collections.abc import Sequence
from typing import Any

from .attempt import Task
from .changes import Changes
from .measure import relative_error
from .plan import Budget, PlanEntry
from .rewrite import Rewrite, own_budgets

#: So many budgets are measured, each by one run of the model.
_POINTS = 4


def larger_budgets(
    changes: Changes,
    rewrites: Sequence[Rewrite],
    tried: Sequence[PlanEntry],
    settled: Sequence[PlanEntry],
    task: Task,
    expected: Any,
) -> tuple[Budget, ...]:
    """Put what was rolled back for its error in place, the most accurate first, and measure the model's error by parts.

    Afterwards the model is as before.

    Args:
        changes: the model, with what was kept in its place.
        rewrites: of the entries, one each.
        tried: what came of each by itself.
        settled: the same when the model's own error had been within the budget.
        task: what was asked for.
        expected: the original's output.

    Returns:
        Budgets that allow more than the present one, by rising error; none where nothing was rolled back for its error.
    """
    lossy = [each for each in zip(rewrites, tried, settled, strict=True) if not each[0].lossless]
    kept = {last.module for _, _, last in lossy if last.kept}
    refused: dict[str, tuple[PlanEntry, Rewrite]] = {}
    for rewrite, first, last in lossy:
        over = math.inf > first.error > task.budget(expected, lossless=False, own=own_budgets(rewrite))
        if last.module not in kept and (first.kept or over):
            refused.setdefault(last.module, (last, rewrite))
    order = sorted(refused.values(), key=lambda each: each[0].error)
    ends = {-(-len(order) * part // _POINTS) for part in range(1, _POINTS + 1)} - {0}
    found: list[Budget] = []
    placed = 0
    try:
        for end in sorted(ends):
            for entry, rewrite in order[placed:end]:
                after = rewrite.replacement(changes.model.get_submodule(entry.module)).eval()
                changes.swap(rewrite.name, entry.module, after)
                placed += 1
            error = relative_error(task.example(changes.model), expected)
            if math.isfinite(error):
                needed = max(error, order[placed - 1][0].error)
                found.append(Budget(needed, len(kept) + placed, len(kept) + len(order)))
    except Exception:  # what runs by itself may not run together; then nothing is told of larger budgets
        found.clear()
    finally:
        for entry, _ in order[:placed]:
            changes.undo(entry.module, entry.rewrite)
    return rising(found)


def rising(found: Sequence[Budget]) -> tuple[Budget, ...]:
    """Leave out each budget that is no smaller than one that keeps more."""
    return tuple(
        each for place, each in enumerate(found) if all(each.max_error < b.max_error for b in found[place + 1 :])
    )
