"""How many trials a check is run on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Check = TypeVar("Check", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Extent:
    """The trials that a check asks for.

    Attributes:
        models: real models' shapes too, beside the small ones: in every dtype (`all`), in the first one that the
            kernel takes (`first`), or not (`none`).
        dtypes: all dtypes of small shapes, else only the first that the kernel takes.
        kernels: kernels are tried.
        references: references are tried.
    """

    models: Literal["all", "first", "none"] = "none"
    dtypes: bool = False
    kernels: bool = True
    references: bool = True


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
