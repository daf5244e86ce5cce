"""One figure before and after, and the word for it, which is never `faster` for what may be noise."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

NOISE = "within noise"
#: That an interval of a median holds the true one. High, because several are looked at in one report.
CONFIDENCE = 0.99


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
        gain_low: the lower end of what the gain may be, by chance.
        gain_high: the upper end.
        better: the word for a gain: `faster` or `smaller`.
        worse: the word for a loss.
    """

    name: str
    unit: str
    before: Spread
    after: Spread
    gain: float
    gain_low: float
    gain_high: float
    better: str
    worse: str

    @property
    def beyond_noise(self) -> bool:
        """Whether the difference is more than chance."""
        return not self.gain_low <= 1 <= self.gain_high

    @property
    def verdict(self) -> str:
        """What may be said of it, in two words."""
        if not self.beyond_noise:
            return NOISE
        if self.gain > 1:
            return f"{self.gain:.2f}x {self.better}"
        return f"{1 / self.gain:.2f}x {self.worse}"

    @property
    def interval(self) -> str:
        """The gain, and what it may be by chance."""
        return f"{self.gain:.2f}x [{self.gain_low:.2f} to {self.gain_high:.2f}]"

    @property
    def settled(self) -> bool:
        """Whether the gain is known to a tenth."""
        return self.gain_high - self.gain_low <= 0.1 * self.gain

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "verdict": self.verdict}


def of_times(name: str, tokens: int, before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare tokens per second, from the seconds of interleaved rounds."""
    # Ratios of neighbouring runs: a machine that slows down meanwhile does not count as a difference.
    ratios = [old / new for old, new in zip(before, after, strict=True)]
    low, high = median_interval(ratios)
    return Comparison(
        name=name,
        unit="tokens/s",
        before=Spread.of([tokens / seconds for seconds in before]),
        after=Spread.of([tokens / seconds for seconds in after]),
        gain=statistics.median(ratios),
        gain_low=low,
        gain_high=high,
        better="faster",
        worse="slower",
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies, with `CONFIDENCE`, whatever the distribution; with 1 in it if there are too few.

    As many values as coin tosses show heads lie below the median, so the count of heads tells which two of the sorted
    values enclose it.
    """
    ordered, count = sorted(values), len(values)
    outside, inner = 0.0, -1
    while inner + 1 < count / 2:
        outside += 2 * math.comb(count, inner + 1) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        inner += 1
    if inner < 0:
        return min(1.0, ordered[0]), max(1.0, ordered[-1])
    return ordered[inner], ordered[count - 1 - inner]


def of_bytes(name: str, before: Sequence[int], after: Sequence[int]) -> Comparison:
    """Compare bytes of several processes; ranges that touch are noise, and so is a single process each."""
    old, new = (Spread.of([size / 2**20 for size in sizes]) for sizes in (before, after))
    gain = old.median / max(new.median, 1e-9)
    low, high = min(before) / max(*after, 1), max(before) / max(min(after), 1)
    if min(len(before), len(after)) == 1:
        low, high = min(low, 1.0), max(high, 1.0)
    return Comparison(
        name=name,
        unit="MiB",
        before=old,
        after=new,
        gain=gain,
        gain_low=low,
        gain_high=high,
        better="smaller",
        worse="larger",
    )
