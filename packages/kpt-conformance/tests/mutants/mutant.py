"""A planted fault, and the kernels of `moe.grouped_mm` whose faults can be switched on one by one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import honest
from kpt_conformance.trial import Trial

#: A kernel's forward and, if it has one, its backward.
Functions = tuple[honest.Function, ...]


@dataclass(frozen=True)
class Parts:
    """What a kernel of `moe.grouped_mm` is made of."""

    forward: honest.Part = honest.product
    for_x: honest.Part = honest.product_for_x
    for_weight: honest.Part = honest.product_for_weight

    def functions(self) -> Functions:
        return honest.grouped_mm_of(self.forward, self.for_x, self.for_weight)


@dataclass(frozen=True, eq=False)
class Mutant:
    """A kernel with a fault.

    Attributes:
        name: the fault.
        op: of which the kernel is.
        found_by: the check of the suite that must find it.
        make: makes its forward and its backward.
        offer: what the backend declares beside it.
        at: the trials that are likeliest to show it, which are run first.
        change: plants the fault in a kernel of `moe.grouped_mm` that may have others; None if it stands alone.
        wrap: likewise, around the functions that the parts gave.
    """

    name: str
    op: str
    found_by: str
    make: Callable[[], Functions]
    offer: dict[str, Any] = field(default_factory=dict)
    at: Callable[[Trial], bool] = lambda trial: False
    change: Callable[[Parts], Parts] | None = None
    wrap: Callable[..., Functions] | None = None


def combined(mutants: Iterable[Mutant]) -> Functions:
    """A kernel of `moe.grouped_mm` with the faults of all."""
    parts = Parts()
    for mutant in mutants:
        parts = mutant.change(parts) if mutant.change else parts
    functions = parts.functions()
    for mutant in mutants:
        functions = mutant.wrap(*functions) if mutant.wrap else functions
    return functions


def of_parts(name: str, found_by: str, change: Callable[[Parts], Parts], **settings: Any) -> Mutant:
    """A mutant of `moe.grouped_mm` one of whose parts is changed."""
    at = settings.pop("at", lambda trial: False)
    return Mutant(name, "moe.grouped_mm", found_by, lambda: change(Parts()).functions(), settings, at, change=change)


def of_wrapper(name: str, found_by: str, wrap: Callable[..., Functions], **settings: Any) -> Mutant:
    """A mutant of `moe.grouped_mm` around whose functions there is a fault."""
    at = settings.pop("at", lambda trial: False)
    return Mutant(name, "moe.grouped_mm", found_by, lambda: wrap(*Parts().functions()), settings, at, wrap=wrap)
