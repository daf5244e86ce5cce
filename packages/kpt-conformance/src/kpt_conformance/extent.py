"""How many trials a check is run on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from kpt_core.cases import Case

Check = TypeVar("Check", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Extent:
    """The trials that a check asks for.

    Attributes:
        models: real models' shapes too, beside the small ones: in every dtype (`all`), in the first one that the
            kernel takes (`first`), or not (`none`).
        drawn: likewise cases that are drawn from the table's domain.
        dtypes: all dtypes of small shapes, else only the first that the kernel takes.
        first_case: of the table's cases only the first.
        kernels: kernels are tried.
        references: references are tried.
    """

    models: Literal["all", "first", "none"] = "none"
    drawn: Literal["all", "first", "none"] = "none"
    dtypes: bool = False
    first_case: bool = False
    kernels: bool = True
    references: bool = True

    def dtypes_of(self, case: Case, dtypes: tuple[torch.dtype, ...], *, slow: bool = False) -> tuple[torch.dtype, ...]:
        """Of the dtypes that a kernel takes, those in which a case is tried.

        Args:
            case: of the table, or drawn.
            dtypes: that the kernel takes.
            slow: an interpreter runs the kernel. It takes seconds for a drawn case: what would be tried in every dtype
                is tried in the first, the rest is not.
        """
        plain = "all" if self.dtypes else "first"
        drawn = {"all": "first", "first": "none", "none": "none"}[self.drawn] if slow else self.drawn
        wanted = drawn if case.drawn else self.models if case.model else plain
        return {"all": dtypes, "first": dtypes[:1], "none": ()}[wanted]


def over(**extent: Any) -> Callable[[Check], Check]:
    """Say on which trials a check is run, by the fields of `Extent`."""

    def mark(check: Check) -> Check:
        check.kpt_extent = Extent(**extent)  # type: ignore[attr-defined]
        return check

    return mark


def extent_of(check: Callable[..., None]) -> Extent:
    """What `over` said."""
    extent: Extent = check.kpt_extent  # type: ignore[attr-defined]
    return extent
