"""`optimize`: try each rewrite at each module, measure it, keep it only if it pays, and say so."""

import copy
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from typing import Any

import torch
from torch import nn

from . import _registry
from ._errors import InputError, UnknownNameError
from ._measure import gain_of, interleaved_times, parameter_bytes, relative_error
from ._plan import Plan, PlanEntry
from ._rewrite import LEVELS, Rewrite, Site, check_level, check_objective
from ._selection import REFERENCE, Selection
from ._settings import record

#: What a rewrite may change, relative to the largest value of the output, where the caller sets no budget.
DEFAULT_MAX_ERROR = {"conservative": 1e-4, "balanced": 2e-2, "aggressive": 1e-1}

Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Optimized:
    """A model with a plan's rewrites in force.

    Attributes:
        model: the model to use.
        plan: what was tried, kept, gained and lost.
    """

    model: nn.Module
    plan: Plan
    #: path -> what stood there before each rewrite, the original first.
    _originals: dict[str, list[nn.Module]] = field(default_factory=dict, repr=False)

    def revert(self, module: str | None = None) -> None:
        """Put the original of one module back, or those of all.

        Raises:
            UnknownNameError: that module was not changed.
        """
        if module is not None and module not in self._originals:
            raise UnknownNameError("changed module", module, self._originals)
        for path in [module] if module is not None else list(self._originals):
            _put(self.model, path, self._originals.pop(path)[0])


def optimize(
    model: nn.Module,
    level: str = "balanced",
    objective: str = "latency",
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    max_error: float | None = None,
    inplace: bool = False,
    on_progress: Progress | None = None,
) -> Optimized:
    """Change what pays and roll back the rest.

    Every rewrite that the level allows is tried at every module where it applies, on the inputs that this module gets
    when the model runs the example: its output is compared with the original's, the two are timed in turn, and it is
    kept only if it is within the error budget and better by more than the noise of the measurement. Lossless rewrites
    that are neither better nor worse are rolled back too. At the end the whole model is measured the same way.

    Args:
        model: any module; it is deep-copied, and left as it is, unless `inplace`.
        level: `conservative` (same dtypes), `balanced` (lossy rewrites within the budget) or `aggressive`.
        objective: `latency` (of the example) or `memory` (bytes of parameters).
        example_inputs: positional arguments, or keyword arguments, for `model(...)`.
        max_error: budget for each module's output and for the model's, as `max |after - before| / max |before|`. None
            gives 1e-4, 2e-2 or 1e-1 by level.
        inplace: change `model` itself.
        on_progress: called with (done, total, what is tried next).

    Returns:
        The model, its plan, and the way back.

    Raises:
        InputError: no model, no example, a negative budget, or the example does not run.
        UnknownNameError: no such level or objective.
    """
    _check_model(model)
    check_level(level)
    check_objective(objective)
    budget = DEFAULT_MAX_ERROR[level] if max_error is None else max_error
    if not budget >= 0:
        raise InputError(f"max_error must be at least 0; got {max_error!r}")
    args, kwargs = _as_call(example_inputs)
    original = model
    work = Optimized(model if inplace else copy.deepcopy(model), plan=None)  # type: ignore[arg-type]
    tries = [(rewrite, site) for rewrite in _allowed(level) for site in rewrite.sites(work.model)]
    training = work.model.training
    work.model.eval()
    entries: list[PlanEntry] = []
    try:
        with torch.no_grad():
            try:
                expected = work.model(*args, **kwargs)
            except Exception as failure:
                raise InputError(
                    f"the model does not run on the example inputs: {type(failure).__name__}: {failure}"
                ) from failure
            for done, (rewrite, site) in enumerate(tries):
                if on_progress is not None:
                    on_progress(done, len(tries), f"{rewrite.name} at {site.module}")
                entries.append(_attempt(work, rewrite, site, args, kwargs, objective, budget))
            device = _device(work.model)
            entries, error = _settle(work, entries, args, kwargs, expected, budget)
            before, after = _contest(work, args, kwargs, device)
            gain, noise = gain_of(before, after)
            if objective == "latency" and gain < 1 - 2 * noise:
                work.revert()
                reason = f"with the kept rewrites together the model was slower, {gain:.2f}x"
                entries = [replace(entry, kept=False, reason=reason) if entry.kept else entry for entry in entries]
                after, error = before, 0.0
        bytes_after = parameter_bytes(work.model)
        bytes_before = _bytes_of_original(work)
    except BaseException:
        work.revert()
        raise
    finally:
        work.model.train(training)
    if on_progress is not None:
        on_progress(len(tries), len(tries), "done")
    work.plan = Plan(
        model=type(original).__name__,
        level=level,
        objective=objective,
        device=str(device),
        max_error=budget,
        versions=_versions(),
        entries=tuple(entries),
        seconds_before=statistics.median(before),
        seconds_after=statistics.median(after),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        error=error,
    )
    return work


def apply_plan(model: nn.Module, plan: Plan, *, inplace: bool = False) -> Optimized:
    """Apply the kept entries of a plan to a model, without measuring again.

    Raises:
        InputError: a module of the plan is not in the model, or its rewrite does not apply there any more.
        UnknownNameError: a rewrite of the plan is not installed.
    """
    _check_model(model)
    work = Optimized(model if inplace else copy.deepcopy(model), plan)
    installed = _registry.rewrites()
    try:
        for entry in plan.kept:
            if entry.rewrite not in installed:
                raise UnknownNameError("rewrite", entry.rewrite, installed, "(named by the plan)")
            rewrite = installed[entry.rewrite]
            if entry.module not in {site.module for site in rewrite.sites(work.model)}:
                raise InputError(
                    f"the plan changes {entry.module!r} by {entry.rewrite}, which does not apply to this "
                    f"{type(model).__name__}: make a plan for this model"
                )
            _swap(work, rewrite, entry.module)
    except BaseException:
        work.revert()
        raise
    return work


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module; got {model!r}: pass the loaded model")


def _as_call(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise InputError(
        "example_inputs must be a sequence of arguments or a mapping of keyword arguments for the model; "
        f"got {type(example_inputs).__name__}"
    )


def _allowed(level: str) -> list[Rewrite]:
    return [
        rewrite
        for _, rewrite in sorted(_registry.rewrites().items(), key=lambda item: (not item[1].lossless, item[0]))
        if LEVELS.index(rewrite.level) <= LEVELS.index(level)
    ]


def _attempt(
    work: Optimized,
    rewrite: Rewrite,
    site: Site,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    objective: str,
    budget: float,
) -> PlanEntry:
    """Try one rewrite at one module, and keep or roll it back."""
    current = work.model.get_submodule(site.module)
    call = _capture(work.model, current, args, kwargs)

    def entry(kernel: str, gain: float, error: float, kept: bool, reason: str) -> PlanEntry:
        return PlanEntry(site.module, rewrite.name, site.op, kernel, gain, error, kept, reason)

    if call is None:
        return entry("", 1.0, 0.0, False, "the example inputs do not reach this module")
    module_args, module_kwargs = call
    try:
        candidate = rewrite.replacement(current)
        with record() as log:
            output = candidate(*module_args, **module_kwargs)
    except Exception as failure:
        return entry("", 1.0, 0.0, False, f"it failed: {type(failure).__name__}: {failure}")
    error = relative_error(output, current(*module_args, **module_kwargs))
    kernel = _kernel_of(site.op, log)
    if error > budget:
        return entry(kernel, 1.0, error, False, f"error {error:.1e} exceeds the budget of {budget:.1e}")
    if objective == "memory":
        gain, noise = parameter_bytes(current) / max(parameter_bytes(candidate), 1), 0.0
    else:
        contest = (lambda: current(*module_args, **module_kwargs), lambda: candidate(*module_args, **module_kwargs))
        gain, noise = gain_of(*interleaved_times(contest, _device(current)))
    what = "smaller" if objective == "memory" else "faster"
    if gain <= 1 + 2 * noise:
        return entry(kernel, gain, error, False, f"not {what} by more than the noise ({2 * noise:.1%})")
    _swap(work, rewrite, site.module, candidate)
    return entry(kernel, gain, error, True, f"{gain:.2f}x {what}")


def _settle(
    work: Optimized,
    entries: list[PlanEntry],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: Any,
    budget: float,
) -> tuple[list[PlanEntry], float]:
    """Roll kept rewrites back, the least accurate first, until the model's own output is within the budget."""
    while True:
        error = relative_error(work.model(*args, **kwargs), expected)
        kept = [entry for entry in entries if entry.kept]
        if error <= budget or not kept:
            return entries, error
        worst = max(kept, key=lambda entry: entry.error)
        reason = f"with it the model's error was {error:.1e}, over the budget of {budget:.1e}"
        # Rewrites of one module build on each other: those after the worst go with it.
        on_module = [entry for entry in kept if entry.module == worst.module]
        gone = on_module[on_module.index(worst) :]
        for _ in gone:
            _undo_last(work, worst.module)
        entries = [replace(entry, kept=False, reason=reason) if entry in gone else entry for entry in entries]


def _contest(
    work: Optimized, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds of the model without and with the rewrites, in turn."""
    changed = {path: work.model.get_submodule(path) for path in work._originals}
    originals = {path: chain[0] for path, chain in work._originals.items()}

    def run(modules: dict[str, nn.Module]) -> None:
        for path, module in modules.items():
            _put(work.model, path, module)
        work.model(*args, **kwargs)

    try:
        before, after = interleaved_times((lambda: run(originals), lambda: run(changed)), device, seconds=2.0)
    finally:
        for path, module in changed.items():
            _put(work.model, path, module)
    return before, after


def _undo_last(work: Optimized, path: str) -> None:
    _put(work.model, path, work._originals[path].pop())
    if not work._originals[path]:
        del work._originals[path]


def _bytes_of_original(work: Optimized) -> int:
    changed = {path: work.model.get_submodule(path) for path in work._originals}
    for path, chain in work._originals.items():
        _put(work.model, path, chain[0])
    total = parameter_bytes(work.model)
    for path, module in changed.items():
        _put(work.model, path, module)
    return total


def _swap(work: Optimized, rewrite: Rewrite, path: str, candidate: nn.Module | None = None) -> None:
    current = work.model.get_submodule(path)
    _put(work.model, path, candidate if candidate is not None else rewrite.replacement(current))
    work._originals.setdefault(path, []).append(current)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _capture(
    model: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The first call that `module` gets when the model runs, or None."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def hook(_: nn.Module, call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append((call_args, call_kwargs))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        model(*args, **kwargs)
    finally:
        handle.remove()
    return calls[0] if calls else None


def _kernel_of(op: str, log: Sequence[Selection]) -> str:
    for selection in log:
        if selection.op == op:
            return selection.kernel
        inner = _kernel_of(op, selection.children)
        if inner:
            return inner
    return REFERENCE if not log else log[0].kernel


def _device(module: nn.Module) -> torch.device:
    tensor = next(iter((*module.parameters(), *module.buffers())), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def _versions() -> dict[str, str]:
    ours = {d.name: d.version for d in distributions() if d.name.startswith("kpt-")}
    return {"python": platform.python_version(), "torch": torch.__version__, **dict(sorted(ours.items()))}
