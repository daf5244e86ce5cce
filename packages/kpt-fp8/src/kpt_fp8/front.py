"""The choices that nothing beats: most gained for the error that they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Squared error of what costs nothing that could be measured.
_NOTHING = 1e-30


@dataclass(frozen=True, slots=True)
class Option:
    """One version of a layer.

    Attributes:
        name: of the layer.
        granularity: of the version.
        gain: what it saves, seconds or bytes; positive.
        error: of the model's output with it alone.
    """

    name: str
    granularity: str
    gain: float
    error: float


@dataclass(frozen=True, slots=True)
class Step:
    """A version that takes the place of the layer, or of an earlier version of it.

    Attributes:
        option: the version.
        gain: of all layers up to here.
        error: likewise, predicted: errors of different layers are independent, so their squares add.
    """

    option: Option
    gain: float
    error: float


def front_of(options: Sequence[Option]) -> list[Step]:
    """Steps from nothing to most gain, by what each gains for its squared error, the best first.

    After each step no other choice is predicted to gain as much for a smaller error, but for what lies between two
    steps: these are the corners of the convex hull of all choices (the multiple-choice knapsack's relaxation: Sinha
    and Zoltners, Operations Research 27(3), 1979).
    """
    layers: dict[str, list[Option]] = {}
    for option in options:
        layers.setdefault(option.name, []).append(option)
    moves: list[tuple[float, int, Option, float, float]] = []
    for several in layers.values():
        gain = cost = 0.0
        for option in _hull(several):
            added, paid = option.gain - gain, _cost(option) - cost
            moves.append((-added / paid, len(moves), option, added, paid))
            gain, cost = option.gain, _cost(option)
    steps: list[Step] = []
    gain = cost = 0.0
    for _, _, option, added, paid in sorted(moves):
        gain, cost = gain + added, cost + paid
        steps.append(Step(option, gain, cost**0.5))
    return steps


def chosen_by(steps: Sequence[Step]) -> Mapping[str, str]:
    """By layer the granularity that is in force after the steps."""
    return {step.option.name: step.option.granularity for step in steps}


def _cost(option: Option) -> float:
    return max(option.error**2, _NOTHING)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The versions of a layer that are best at some price, by rising cost and falling gain for it."""
    hull: list[Option] = []
    gain = cost = 0.0
    rest = list(options)
    while rest:
        best = max(rest, key=lambda option: ((option.gain - gain) / (_cost(option) - cost), option.gain))
        hull.append(best)
        gain, cost = best.gain, _cost(best)
        rest = [option for option in rest if option.gain > gain and _cost(option) > cost]
    return hull
