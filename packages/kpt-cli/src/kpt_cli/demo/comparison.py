"""One figure before and after, and the word for it, which is never `faster` for what may be noise."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NOISE = "within noise"


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was measured several times.

    Attributes:
        median: the middle one.
        low: the first quartile.
        high: the third quartile.
        runs: how often.
    """

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise measurements."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure of the model before and after.

    Attributes:
        name: what was measured.
        unit: of the figure.
        before: with transformers' default experts.
        after: with the plan applied.
        gain: how many times better, above 1 is better.
        noise: what of the gain may be chance, relative to 1.
        better: the word for a gain: `faster` or `smaller`.
        worse: the word for a loss.
    """

    name: str
    unit: str
    before: Spread
    after: Spread
    gain: float
    noise: float
    better: str
    worse: str

    @property
    def beyond_noise(self) -> bool:
        """Whether the difference is more than chance."""
        return abs(self.gain - 1) > self.noise

    @property
    def verdict(self) -> str:
        """What may be said of it, in two words."""
        if not self.beyond_noise:
            return NOISE
        if self.gain > 1:
            return f"{self.gain:.2f}x {self.better}"
        return f"{1 / self.gain:.2f}x {self.worse}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        from dataclasses import asdict

        return {**asdict(self), "verdict": self.verdict}


def of_times(name: str, tokens: int, before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare tokens per second, from the seconds of interleaved rounds."""
    import kpt_core

    gain, error = kpt_core.gain_of(before, after)
    return Comparison(
        name=name,
        unit="tokens/s",
        before=Spread.of([tokens / seconds for seconds in before]),
        after=Spread.of([tokens / seconds for seconds in after]),
        gain=gain,
        noise=2 * error,
        better="faster",
        worse="slower",
    )


def of_bytes(name: str, before: Sequence[int], after: Sequence[int]) -> Comparison:
    """Compare bytes of several processes; ranges that touch are noise, and so is a single process each."""
    old, new = (Spread.of([size / 2**20 for size in sizes]) for sizes in (before, after))
    apart = min(len(before), len(after)) > 1 and (max(before) < min(after) or max(after) < min(before))
    gain = old.median / new.median
    return Comparison(
        name=name,
        unit="MiB",
        before=old,
        after=new,
        gain=gain,
        noise=0.0 if apart else abs(gain - 1),
        better="smaller",
        worse="larger",
    )
