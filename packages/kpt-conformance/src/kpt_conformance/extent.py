"""How many trials a check is run on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from kpt_optimize.cases import Case

Dtypes = tuple[torch.dtype, ...]
Check = TypeVar("Check", bound=Callable[..., None])
#: Of so many cases one is tried in a rare dtype; of those that somebody wrote the check of values tries all.
_FEW = 8


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
        telling: options of which a case tells something where one has not its first value, as dropout does where
            randomness is tried: a quick run has such cases before all others.
    """

    models: Literal["all", "first", "none"] = "none"
    drawn: Literal["all", "first", "none"] = "none"
    dtypes: bool = False
    first_case: bool = False
    kernels: bool = True
    references: bool = True
    telling: tuple[str, ...] = ()

    def trials(
        self, cases: Sequence[Case], dtypes: Dtypes, rare: Dtypes = (), *, slow: bool = False
    ) -> Iterator[tuple[Case, torch.dtype]]:
        """Yield the cases that are tried, those that are drawn last, each in the dtypes in which it is."""
        for place, case in enumerate(cases[:1] if self.first_case else cases):
            yield from ((case, dtype) for dtype in self.dtypes_of(case, dtypes, rare, place, slow=slow))

    def dtypes_of(self, case: Case, dtypes: Dtypes, rare: Dtypes = (), place: int = 0, *, slow: bool = False) -> Dtypes:
        """Return those of the dtypes that a kernel takes in which a case is tried.

        Args:
            case: of the table, or drawn.
            dtypes: that the kernel takes.
            rare: likewise, of those that few use: a check that tries all dtypes tries them on one in `_FEW` of the
                small cases of a table, a thorough one on all of these, and on one in `_FEW` of those that are drawn.
            place: of the case in its table.
            slow: an interpreter runs the kernel. It takes seconds for a drawn case: what would be tried in every dtype
                is tried in the first, the rest is not.
        """
        thorough = self.drawn == "all"
        if case.once is not None:
            every = (*dtypes, *rare)
            return every[case.once % len(every) :][:1] if every and thorough and not slow else ()
        few = place % _FEW == 0
        seldom = (few and thorough and not slow) if case.drawn else (few or thorough)
        return (*self._usual(case, dtypes, slow), *(rare if self.dtypes and seldom and not case.model else ()))

    def _usual(self, case: Case, dtypes: Dtypes, slow: bool) -> Dtypes:
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
