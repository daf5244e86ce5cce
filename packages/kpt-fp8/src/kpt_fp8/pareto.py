"""Find the choices that nothing beats: most gained for the error that they cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Option:
    """One version of a layer: what it saves, in seconds or bytes, and the model's error with it alone."""

    name: str
    granularity: str
    gain: float
    error: float

    @property
    def cost(self) -> float:
        """The squared error, of which those of different layers add; a little where none could be measured."""
        return max(self.error**2, 1e-30)


_Option = TypeVar("_Option", bound=Option)


def front_of(options: Sequence[_Option]) -> list[_Option]:
    """Order steps from nothing to most gain, by what each gains for its squared error, the best first.

    A step converts a layer, or takes the place of an earlier version of it. After each no other choice is predicted to
    gain as much for a smaller error, but for what lies between two steps: these are the corners of the convex hull of
    all choices (the multiple-choice knapsack's relaxation: Sinha and Zoltners, Operations Research 27(3), 1979).
    """
    steps: list[tuple[float, _Option]] = []
    for name in dict.fromkeys(option.name for option in options):
        gain = cost = 0.0
        rest = [option for option in options if option.name == name and option.gain > 0]
        while rest:  # versions that are best at some price
            best = max(rest, key=lambda option: ((option.gain - gain) / (option.cost - cost), option.gain))
            steps.append(((best.gain - gain) / (best.cost - cost), best))
            gain, cost = best.gain, best.cost
            rest = [option for option in rest if option.gain > gain and option.cost > cost]
    return [option for _, option in sorted(steps, key=lambda step: -step[0])]
