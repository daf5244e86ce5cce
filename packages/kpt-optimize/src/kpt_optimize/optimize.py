"""`optimize`: try each rewrite at each module, measure it, keep it only if it pays, and say so."""

import copy
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core.errors import InputError, UnknownNameError

from .attempt import Task, attempt_rewrite, sites_of
from .budgets import larger_budgets
from .changes import Changes
from .measure import UNSTEADY, Load, device_of, gain_of, noise_share, parameter_bytes, relative_error, settled_times
from .plan import Plan, PlanEntry
from .rewrite import LEVELS, Rewrite, check_level, check_max_error, check_model, check_objective, own_budgets, rewrites
from .trial import Example, repeatable, setback

Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Optimized:
    """A model with a plan's rewrites in force.

    It keeps the originals of what was replaced, and with them their memory, for `revert`; `commit` lets go of them.

    Attributes:
        model: the model to use.
        plan: what was tried, kept, gained and lost.
    """

    model: nn.Module
    plan: Plan
    #: The way back; None where there is none.
    _changes: Changes | None = field(default=None, repr=False)

    def revert(self, module: str | None = None) -> None:
        """Put the original of one module back, or those of all, in the mode and on the device of what stands there.

        Values that a rewrite did not share (those of lossy ones) are what they were before, in the dtype of then.

        Raises:
            UnknownNameError: that module was not changed.
            InputError: the changes were committed.
        """
        if self._changes is None:
            raise InputError("the changes were committed: there is no way back")
        if module is None:
            self._changes.revert()
        elif not self._changes.undo(module):
            raise UnknownNameError("changed module", module, self._changes.paths)

    def commit(self) -> None:
        """Forget the way back, which frees the memory of the originals."""
        self._changes = None


def optimize(
    model: nn.Module,
    level: str = "balanced",
    objective: str = "latency",
    *,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    max_error: float | None = None,
    inplace: bool = False,
    on_progress: Progress | None = None,
) -> Optimized:
    """Change what pays and roll back the rest.

    Every rewrite that the level allows is tried at every module where it applies, on the inputs that this module gets
    when the model runs the example: its output is compared with the original's, the two are timed in turn, and it is
    kept only if it is within the error budget and better by more than the noise of the measurement. Lossless rewrites
    that are neither better nor worse are rolled back too. At the end the whole model is measured the same way.

    A module that the model uses at several paths is replaced at all of them. A rewrite that would give a module weights
    of its own where it shares them with another is refused.

    Args:
        model: any module; it is deep-copied, and left as it is, unless `inplace`.
        level: `conservative` (same dtypes), `balanced` (lossy rewrites within the budget) or `aggressive`.
        objective: `latency` (of the example) or `memory` (bytes of parameters).
        example_inputs: a tensor, positional arguments or keyword arguments for `model(...)`. The model runs them many
            times, so it must give the same output each time: no cache that grows.
        max_error: budget for each module's output and for the model's, as `max |after - before| / max |before|`. None
            gives 1e-4, 2e-2 or 1e-1 by level, and for lossless rewrites and the model as a whole at least four times
            the `eps` of the output's dtype (3.1e-2 in bfloat16, 3.9e-3 in float16): other orders of sums differ so.
        inplace: change `model` itself.
        on_progress: called with (done, total, what is tried next).

    Returns:
        The model, its plan, and the way back.

    Raises:
        InputError: no model, no example, a negative budget, or the example does not run, or not twice the same, or
            gives no floating tensors that could be compared.
        UnknownNameError: no such level or objective.
    """
    check_model(model)
    check_level(level)
    check_objective(objective)
    check_max_error(max_error)
    task = Task(Example.of(example_inputs, "example_inputs"), level, objective, max_error)
    changes = Changes(model if inplace else copy.deepcopy(model))
    tries = [(rewrite, site) for rewrite in _allowed(level) for site in sites_of(rewrite, changes.model)]
    entries: list[PlanEntry] = []
    load = Load()
    try:
        with changes.evaluating(), torch.no_grad():
            expected = repeatable(lambda: task.example(changes.model), "example")
            for done, (rewrite, site) in enumerate(tries):
                if on_progress is not None:
                    on_progress(done, len(tries), f"{rewrite.name} at {site.module}")
                entries.append(attempt_rewrite(changes, rewrite, site, task))
            kept = {entry.rewrite for entry in entries if entry.kept}
            own = [own_budgets(rewrite) for rewrite, _ in tries if rewrite.name in kept]
            budget = max(task.budget(expected), *(task.budget(expected, own=each) for each in own), 0.0)
            settled, error = _settle(changes, entries, task, expected, budget)
            plan = conclude(
                changes,
                settled,
                lambda: task.example(changes.model),
                level=level,
                objective=objective,
                budget=budget,
                error=error,
                load=load,
            )
            if plan.kept or not any(entry.kept for entry in settled):  # else more of it would not pay either
                found = larger_budgets(changes, [rewrite for rewrite, _ in tries], entries, settled, task, expected)
                plan = replace(plan, budgets=found)
    except BaseException:
        changes.revert()
        raise
    if on_progress is not None:
        on_progress(len(tries), len(tries), "done")
    return Optimized(changes.model, plan, changes)


def apply_plan(model: nn.Module, plan: Plan | str | os.PathLike[str], *, inplace: bool = False) -> Optimized:
    """Apply the kept entries of a plan, or of a plan's file, to a model, without measuring again.

    Raises:
        InputError: a module of the plan is not in the model, its rewrite does not apply there any more, or the file is
            no plan.
        UnknownNameError: a rewrite of the plan is not installed.
    """
    check_model(model)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    changes = Changes(model if inplace else copy.deepcopy(model))
    installed = rewrites()
    try:
        for entry in plan.kept:
            if entry.rewrite not in installed:
                raise UnknownNameError("rewrite", entry.rewrite, installed, "(named by the plan)")
            rewrite = installed[entry.rewrite]
            if entry.module not in {site.module for site in sites_of(rewrite, changes.model)}:
                raise InputError(
                    f"the plan changes {entry.module!r} by {entry.rewrite}, which does not apply to this "
                    f"{type(model).__name__}: make a plan for this model"
                )
            current = changes.model.get_submodule(entry.module)
            changes.swap(rewrite.name, entry.module, rewrite.replacement(current))
    except BaseException:
        changes.revert()
        raise
    finally:
        changes.restore_training()
    return Optimized(changes.model, plan, changes)


def _allowed(level: str) -> list[Rewrite]:
    return [
        rewrite
        for _, rewrite in sorted(rewrites().items(), key=lambda item: (not item[1].lossless, item[0]))
        if LEVELS.index(rewrite.level) <= LEVELS.index(level)
    ]


def conclude(
    changes: Changes,
    entries: Sequence[PlanEntry],
    run: Callable[[], object],
    *,
    level: str,
    objective: str,
    budget: float,
    error: float,
    load: Load | None = None,
) -> Plan:
    """Judge what is in force on the whole model: time it with and without, and take all back where that does not pay.

    Args:
        changes: the model, with what was kept in its place.
        entries: what was tried; what the kept ones say is in force.
        run: runs the model on its example.
        level: goes into the plan.
        objective: `latency` or `memory`.
        budget: goes into the plan, as the error allowed.
        error: of the model's output with what was kept.
        load: of the machine since the first was tried, for the plan's note.
    """
    device = device_of(changes.model)
    before, after = _contest(changes, run, device)
    bytes_before, bytes_after = _bytes(changes)
    reason = setback((before, after), (bytes_before, bytes_after), objective, "rewrites")
    if reason is not None:
        changes.revert()
        entries = [replace(entry, kept=False, reason=reason) if entry.kept else entry for entry in entries]
        after, bytes_after, error = before, bytes_before, 0.0
    gain, noise = gain_of(before, after)
    noisy = noise_share(gain, noise) > UNSTEADY or any(entry.noisy for entry in entries)
    return Plan(
        model=type(changes.model).__name__,
        level=level,
        objective=objective,
        device=str(device),
        max_error=budget,
        versions=_versions(),
        entries=tuple(entries),
        seconds_before=statistics.median(before),
        seconds_after=statistics.median(before) / gain,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        error=error,
        gain=gain,
        noise=noise,
        note="" if load is None or objective == "memory" else load.note(noisy=noisy),
    )


def _settle(
    changes: Changes, entries: list[PlanEntry], task: Task, expected: Any, budget: float
) -> tuple[list[PlanEntry], float]:
    """Roll kept rewrites back, the least accurate first, until the model's own output is within the budget."""
    while True:
        error = relative_error(task.example(changes.model), expected)
        kept = [entry for entry in entries if entry.kept]
        if error <= budget or not kept:
            return entries, error
        worst = max(kept, key=lambda entry: entry.error)
        reason = f"with it the model's error was {error:.1e}, over the budget of {budget:.1e}"
        # Rewrites of one module build on each other: those after the worst go with it.
        gone = {(change.rewrite, path) for change in changes.undo(worst.module, worst.rewrite) for path in change.paths}
        entries = [
            replace(entry, kept=False, reason=reason) if entry.kept and (entry.rewrite, entry.module) in gone else entry
            for entry in entries
        ]


def _contest(changes: Changes, run: Callable[[], object], device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds of the model without and with the rewrites, in turn."""

    def before() -> None:
        changes.show_original()
        run()

    def after() -> None:
        changes.show_changed()
        run()

    try:
        original, changed = settled_times((before, after), device, seconds=2.0)
    finally:
        changes.show_changed()
    return original, changed


def _bytes(changes: Changes) -> tuple[int, int]:
    """Bytes of the model without and with the rewrites."""
    changes.show_original()
    before = parameter_bytes(changes.model)
    changes.show_changed()
    return before, parameter_bytes(changes.model)


def _versions() -> dict[str, str]:
    ours = {d.name: d.version for d in distributions() if d.name.startswith("kpt-")}
    return {"python": platform.python_version(), "torch": torch.__version__, **dict(sorted(ours.items()))}
