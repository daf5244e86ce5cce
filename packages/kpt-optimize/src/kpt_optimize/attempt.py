"""One rewrite at one module: where it applies, and how its replacement is compared."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from kpt_core import registry
from kpt_core.dispatch.settings import record
from kpt_core.errors import InputError
from kpt_core.selection import Selection

from .changes import Changes
from .measure import device_of, parameter_bytes, relative_error, settled_times
from .plan import PlanEntry
from .rewrite import Rewrite, Site, own_budgets
from .trial import Example, RejectedError, attempt, budget_of


@dataclass(frozen=True, slots=True)
class Task:
    """What `optimize` was asked for.

    Attributes:
        example: what the model runs on.
        level: which rewrites are allowed.
        objective: what must get better.
        max_error: the caller's budget, if any.
    """

    example: Example
    level: str
    objective: str
    max_error: float | None

    def budget(self, expected: Any, *, lossless: bool = True, own: Mapping[str, float] | None = None) -> float:
        """The error allowed for an output."""
        return budget_of(expected, self.level, self.max_error, lossless=lossless, own=own)


def sites_of(rewrite: Rewrite, model: nn.Module) -> list[Site]:
    """Where a rewrite applies, each module once; a rewrite that can't tell costs a warning, and applies nowhere."""
    found: dict[nn.Module, Site] = {}
    try:
        for site in rewrite.sites(model):
            if not site.module:
                raise InputError("it names the model itself, which nothing can take the place of")
            found.setdefault(model.get_submodule(site.module), site)
    except Exception as error:
        registry.report(f"rewrite {rewrite.name!r}", f"sites() failed: {type(error).__name__}: {error}")
        return []
    return list(found.values())


def attempt_rewrite(changes: Changes, rewrite: Rewrite, site: Site, task: Task) -> PlanEntry:
    """Try one rewrite at one module; it is in force afterwards if the entry is kept."""
    current = changes.model.get_submodule(site.module)
    call = first_calls([current], [lambda: task.example(changes.model)]).get(current)
    if call is None:
        reason = "the example inputs do not reach this module"
        return PlanEntry(site.module, rewrite.name, site.op, "", 1.0, 0.0, False, reason)
    trial = ModuleTrial(changes.model, current, site, call, task, own_budgets(rewrite))
    entry, winner = trial.attempt(rewrite.name, lambda: rewrite.replacement(current).eval(), lossless=rewrite.lossless)
    if entry.kept:
        changes.swap(rewrite.name, site.module, winner)
    return entry


class ModuleTrial:
    """Replacements of one module, compared and timed on the call that it gets."""

    def __init__(
        self,
        model: nn.Module,
        current: nn.Module,
        site: Site,
        call: Example,
        task: Task,
        own: Mapping[str, float] | None = None,
    ) -> None:
        self._own = own
        self._model, self._current, self._site, self._call, self._task = model, current, site, call, task
        self._expected: Any = None
        #: What served the op, once a candidate has run.
        self.kernel = ""

    def attempt(self, rewrite: str, build: Callable[[], nn.Module], *, lossless: bool) -> tuple[PlanEntry, nn.Module]:
        """Try what a rewrite makes; return the plan's entry, and what is in force."""
        verdict, winner = attempt(self, build, self._current, self._task.objective, lossless=lossless)
        entry = PlanEntry(
            self._site.module,
            rewrite,
            self._site.op,
            self.kernel,
            gain=1.0 if verdict.gain is None else verdict.gain,
            error=verdict.error or 0.0,
            kept=verdict.kept,
            reason=verdict.reason,
            noise=verdict.noise,
        )
        return entry, winner

    def error(self, candidate: nn.Module) -> float:
        """Of its output. A candidate that doesn't call its op, or would untie weights, is rejected."""
        with record() as log:
            output = self._call(candidate)
        kernel = _kernel_of(self._site.op, log)
        if kernel is None:
            raise RejectedError(f"it does not call {self._site.op}")
        self.kernel = kernel
        untied = _untied(self._model, self._current, candidate)
        if untied is not None:
            raise RejectedError(f"it would untie this module's weights from {untied}")
        self._expected = self._call(self._current)
        return relative_error(output, self._expected)

    def budget(self, *, lossless: bool) -> float:
        """The caller's, the rewrite's or the level's."""
        return self._task.budget(self._expected, lossless=lossless, own=self._own)

    def times(self, before: nn.Module, after: nn.Module) -> Sequence[Sequence[float]]:
        """Seconds of a call of each, in turn."""
        return settled_times((lambda: self._call(before), lambda: self._call(after)), device_of(before))

    def bytes(self, candidate: nn.Module) -> int:
        """Bytes of parameters and buffers."""
        return parameter_bytes(candidate)


def first_calls(
    modules: Collection[nn.Module],
    runs: Iterable[Callable[[], object]],
    kind: Callable[[nn.Module, Example], Hashable] = lambda module, _: module,
) -> dict[nn.Module, Example]:
    """Return the first call that each module gets, or one of the same kind; runs go on until all have one."""
    calls: dict[nn.Module, Example] = {}
    known: dict[Hashable, Example] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            call = Example(args, kwargs)
            calls[module] = known.setdefault(kind(module, call), call)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for run in runs:
            if len(calls) < len(modules):
                run()
    return calls


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
