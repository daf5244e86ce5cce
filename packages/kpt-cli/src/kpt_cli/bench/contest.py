"""Shared by all benchmarks: contestants timed in turn, figures without those that are too noisy, a gate."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kpt_core import KptError
from kpt_optimize import gain_of, interleaved_times
from kpt_optimize.measure import UNSTEADY, median_of, noise_share

OURS = "kpt"  #: the contestant that the others are measured beside


@dataclass(frozen=True, slots=True)
class Result:
    """One implementation in one line. A figure whose noise exceeds 20% is None."""

    implementation: str  # `kpt` or a peer's name
    seconds: float | None  # of KPT the median, of a peer that times `gain`
    gain: float | None  # KPT's speed over this implementation's, the median of the rounds' ratios; 1 for `kpt`
    noise: float  # twice the standard error as a share: of `gain`, for `kpt` of its seconds
    times: tuple[float, ...]  # seconds of each round, to the nanosecond: all figures follow from them


@dataclass(frozen=True, slots=True)
class Refused:
    """A line whose result is not right: its name, dtype, the sentence of the `GateError`, and its sizes if it has."""

    title: str
    dtype: str
    reason: str
    shape: Any = None


@dataclass(frozen=True, slots=True)
class OpLine:
    """All results of one case in one dtype, KPT's first."""

    title: str
    dtype: str
    results: tuple[Result, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Contest:
    """One line to measure: KPT's run and its peers' by name, and what raises `GateError` where KPT is not right."""

    title: str
    dtype: torch.dtype
    runs: Mapping[str, Callable[[], object]]
    check: Callable[[], None]


class GateError(KptError):
    """The benchmark refuses to report, because KPT's result is not right."""


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def results_of(names: Sequence[str], times: Sequence[Sequence[float]]) -> list[Result]:
    """Return the figures of interleaved rounds, KPT's first; ratios are medians of the rounds' ratios."""
    ours, *others = (tuple(round(each, 9) for each in taken) for taken in times)
    median, error = median_of(ours)
    own = noise_share(median, error)
    seconds = None if own > UNSTEADY else median
    results = [Result(names[0], seconds, 1.0, own, ours)]
    for name, taken in zip(names[1:], others, strict=True):
        gain, error = gain_of(taken, ours)
        noise = noise_share(gain, error)
        known = None if noise > UNSTEADY else gain
        theirs = None if seconds is None or known is None else known * seconds
        results.append(Result(name, theirs, known, noise, taken))
    return results


def measure(contests: Iterable[Contest], seconds: float) -> Iterator[OpLine | Refused]:
    """Check and time each contest for about so many seconds; yield lines as they come."""
    for contest in contests:
        dtype = short_name(contest.dtype)
        try:
            contest.check()
        except GateError as error:
            yield Refused(contest.title, dtype, str(error))
            continue
        times = interleaved_times([*contest.runs.values()], torch.device("cpu"), seconds)
        yield OpLine(contest.title, dtype, tuple(results_of([*contest.runs], times)))


def require_accuracy(
    what: str, peer: str, sides: Sequence[Tensor], mean_factor: float, max_factor: float, floor: float
) -> None:
    """Raise `GateError` where KPT's mean or largest error exceeds a peer's too much.

    The sides are KPT's result, the peer's and float64's; an error below `floor`, relative to the largest value, is
    free.
    """
    *values, exact = sides
    errors = [(value.double() - exact).abs() for value in values]
    (mean, largest), (peer_mean, peer_largest) = ((e.mean().item(), e.max().item()) for e in errors)
    floor *= exact.abs().max().item()
    if not (mean <= mean_factor * peer_mean + floor and largest <= max_factor * peer_largest + floor):
        raise GateError(
            f"no figures for {what} against float64 is {mean:.2e} on average and {largest:.2e} at most, {peer} "
            f"has {peer_mean:.2e} and {peer_largest:.2e}"
        )
