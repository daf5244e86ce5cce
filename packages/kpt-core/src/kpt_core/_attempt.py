"""One rewrite at one module: tried, compared, measured, kept or not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _registry
from ._changes import Changes
from ._errors import InputError
from ._measure import gain_of, interleaved_times, parameter_bytes, relative_error, rounding
from ._plan import PlanEntry
from ._rewrite import Rewrite, Site
from ._selection import Selection
from ._settings import record

#: What a rewrite may change, relative to the largest value of the output, where the caller sets no budget.
DEFAULT_MAX_ERROR = {"conservative": 1e-4, "balanced": 2e-2, "aggressive": 1e-1}


@dataclass(frozen=True, slots=True)
class Task:
    """What `optimize` was asked for.

    Attributes:
        args: positional arguments of the example.
        kwargs: keyword arguments of the example.
        level: which rewrites are allowed.
        objective: what must get better.
        max_error: the caller's budget, if any.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    level: str
    objective: str
    max_error: float | None

    def run(self, model: nn.Module) -> Any:
        """The model's output for the example."""
        return model(*self.args, **self.kwargs)

    def budget(self, expected: Any, *, lossy: bool = False) -> float:
        """The error allowed for an output: at least what rounding to its dtype explains, unless a rewrite is lossy."""
        if self.max_error is not None:
            return self.max_error
        default = DEFAULT_MAX_ERROR[self.level]
        return default if lossy else max(default, rounding(expected))


def sites_of(rewrite: Rewrite, model: nn.Module) -> list[Site]:
    """Where a rewrite applies, each module once; a rewrite that can't tell costs a warning, and applies nowhere."""
    found: dict[nn.Module, Site] = {}
    try:
        for site in rewrite.sites(model):
            if not site.module:
                raise InputError("it names the model itself, which nothing can take the place of")
            found.setdefault(model.get_submodule(site.module), site)
    except Exception as error:
        _registry.report(f"rewrite {rewrite.name!r}", f"sites() failed: {type(error).__name__}: {error}")
        return []
    return list(found.values())


def attempt(changes: Changes, rewrite: Rewrite, site: Site, task: Task) -> PlanEntry:
    """Try one rewrite at one module; it is in force afterwards if the entry is kept."""
    current = changes.model.get_submodule(site.module)
    call = _capture(changes.model, current, task)

    def entry(reason: str, kernel: str = "", gain: float = 1.0, error: float = 0.0, kept: bool = False) -> PlanEntry:
        return PlanEntry(site.module, rewrite.name, site.op, kernel, gain, error, kept, reason)

    if call is None:
        return entry("the example inputs do not reach this module")
    args, kwargs = call
    try:
        candidate = rewrite.replacement(current).eval()
        with record() as log:
            output = candidate(*args, **kwargs)
    except Exception as failure:
        return entry(f"it failed: {type(failure).__name__}: {failure}")
    kernel = _kernel_of(site.op, log)
    if kernel is None:
        return entry(f"it does not call {site.op}")
    untied = _untied(changes.model, current, candidate)
    if untied is not None:
        return entry(f"it would untie this module's weights from {untied}", kernel)
    expected = current(*args, **kwargs)
    error, budget = relative_error(output, expected), task.budget(expected, lossy=not rewrite.lossless)
    if error > budget:
        return entry(f"error {error:.1e} exceeds the budget of {budget:.1e}", kernel, error=error)
    if task.objective == "memory":
        what, gain, noise = "smaller", parameter_bytes(current) / max(parameter_bytes(candidate), 1), 0.0
    else:
        contest = (lambda: current(*args, **kwargs), lambda: candidate(*args, **kwargs))
        what, (gain, noise) = "faster", gain_of(*interleaved_times(contest, device_of(current)))
    if gain <= 1 + 2 * noise:
        return entry(f"not {what} by more than the noise ({2 * noise:.1%})", kernel, gain, error)
    changes.swap(rewrite.name, site.module, candidate)
    return entry(f"{gain:.2f}x {what}", kernel, gain, error, kept=True)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter or buffer lives."""
    tensor = next(iter((*module.parameters(), *module.buffers())), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def _capture(model: nn.Module, module: nn.Module, task: Task) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The first call that `module` gets when the model runs, or None."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append((args, kwargs))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        task.run(model)
    finally:
        handle.remove()
    return calls[0] if calls else None


def _kernel_of(op: str, log: Sequence[Selection]) -> str | None:
    """The kernel that served an op's first call, None if it was not called."""
    for selection in log:
        found = selection.kernel if selection.op == op else _kernel_of(op, selection.children)
        if found is not None:
            return found
    return None


def _untied(model: nn.Module, current: nn.Module, candidate: nn.Module) -> str | None:
    """A parameter outside `current` that is one with a parameter of it, and would not be with one of `candidate`."""
    lost = {id(p) for p in current.parameters()} - {id(p) for p in candidate.parameters()}
    # The memo has the walk pass `current` by, but not children of it that stand elsewhere too.
    for path, module in model.named_modules(memo={current}):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in lost:
                return f"{path}.{name}".lstrip(".")
    return None
