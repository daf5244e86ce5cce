"""When a step is skipped and when a layer escalates: `Guards`, and the host's view of what layers observed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kpt_core import InputError

from .quantizing import ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """The limits that an engine watches.

    Attributes:
        loss_scale: what the loss is multiplied by at first, and at most. It matters where gradients are float16.
        growth_interval: after so many steps in a row that were taken, a loss scale that was halved doubles.
        most_saturated: a step is skipped if a greater share of some tensor saturates under a delayed scale.
        most_skipped: after so many skipped steps in a row, training stops.
        check_every: so often, counted in steps, errors are measured.
        most_error: the mean over rows of the relative error; e4m3 has about 0.03 and e5m2 0.05 where the scale fits.
        patience: a layer escalates after so many bad signs: measured errors above `most_error` and overflows, with no
            good measurement in between.

    Raises:
        InputError: a value is out of range.
    """

    loss_scale: float = 65536.0
    growth_interval: int = 2000
    most_saturated: float = 0.0
    most_skipped: int = 25
    check_every: int = 50
    most_error: float = 0.1
    patience: int = 3

    def __post_init__(self) -> None:
        for name in ("loss_scale", "growth_interval", "most_skipped", "check_every", "most_error", "patience"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InputError(f"Guards: {name} must be positive; got {value}")
        if not 0 <= self.most_saturated < 1:
            raise InputError(
                f"Guards: most_saturated must be a share of at least 0 and below 1; got {self.most_saturated}"
            )


class Observation(NamedTuple):
    """What one layer observed in a step, on the host, of input, weight and gradient; see `Watched.observed`."""

    amax: tuple[float, ...]
    saturated: tuple[float, ...]
    zeros: tuple[float, ...]
    errors: tuple[float, ...]

    def overflown(self, most_saturated: float) -> list[int]:
        """Return the roles of which more saturates than may."""
        return [role for role, share in enumerate(self.saturated) if share > most_saturated]

    def not_finite(self) -> list[int]:
        """Return the roles that held NaN or infinity."""
        return [role for role, top in enumerate(self.amax) if not top < float("inf")]

    def worst(self) -> tuple[float, str]:
        """Return the greatest error, and of what."""
        return max(zip(self.errors, ROLES, strict=True), key=lambda each: each[0])


def causes(
    gradients: Sequence[str], observed: dict[str, Observation], most_saturated: float, shown: int = 3
) -> list[str]:
    """Return what speaks against a step, in parts of a sentence that name `shown` of each kind."""
    bad = [f"{_of(role)} {name!r} is not finite" for name, seen in observed.items() for role in seen.not_finite()]
    clipped = [
        f"{100 * seen.saturated[role]:.3g} % of {_of(role)} {name!r} saturated"
        for name, seen in observed.items()
        for role in seen.overflown(most_saturated)
    ]
    wrong = [f"the gradient of {name!r} is not finite" for name in gradients]
    found = []
    for kind in (bad, clipped, wrong):
        found += kind[:shown] + ([f"{len(kind) - shown} more like it"] if len(kind) > shown else [])
    return found


def _of(role: int) -> str:
    return ("the input of", "the weight of", "the gradient that reaches")[role]
