"""Comparing two platform reports: ratios of the figures that both have, with intervals, without torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kpt_cli.errors import CliError

from .reading import DAMAGED, OURS, Figure, Suite, files_of, machine_name, read_figures, read_hardware, read_steps
from .reading import read_suite as suite_of

#: That both intervals of a ratio's two medians hold the true ones: each does with half the doubt (Bonferroni).
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better a figure is in report B than in report A: faster, or further ahead of a peer."""

    file: str
    case: str
    name: str
    a: float | None  # None where it was too noisy to be given
    b: float | None
    ratio: float
    low: float  # 0 where there are too few rounds to know
    high: float  # inf likewise

    @property
    def told(self) -> bool:
        """Return whether 1 lies outside the interval."""
        return not self.low <= 1 <= self.high

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {"told": self.told}


@dataclass(frozen=True, slots=True)
class Report:
    """What is compared of a report: its machine in a line, its suites and its figures."""

    machine: str
    suites: tuple[Suite, ...]
    figures: dict[tuple[str, str, str], Figure]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports, A and B."""

    a: Report
    b: Report
    ratios: tuple[Ratio, ...]
    only_a: tuple[str, ...]  # figures
    only_b: tuple[str, ...]


def compare_reports(a: Path, b: Path) -> Comparison:
    """Compare two folders; `CliError` if one is no report, or is damaged."""
    first, second = _read(a), _read(b)
    both = [key for key in first.figures if key in second.figures]
    ratios = tuple(_ratio(first.figures[key], second.figures[key]) for key in both)
    only = [tuple(str(f) for key, f in x.figures.items() if key not in both) for x in (first, second)]
    return Comparison(first, second, ratios, only[0], only[1])


def _read(folder: Path) -> Report:
    steps = read_steps(folder)
    try:
        figures = [figure for file in files_of(steps, "bench-") for figure in read_figures(folder, file)]
        suites = tuple(suite_of(folder, file) for file in files_of(steps, "junit-"))
        return Report(machine_name(read_hardware(folder)), suites, {figure.key: figure for figure in figures})
    except DAMAGED as error:
        told = f"{type(error).__name__}: {error}"
        raise CliError(f"{folder} is damaged ({told}); `kpt validate check {folder}` names the file") from None


def _ratio(a: Figure, b: Figure) -> Ratio:
    # Seconds count the other way round than ratios: fewer are better.
    better, worse = (a, b) if a.name == OURS else (b, a)
    (low, high), (least, most) = (median_interval(each.values) for each in (better, worse))
    middle, other = (statistics.median(each.values) for each in (better, worse))
    return Ratio(*a.key, a.value, b.value, middle / other, low / most, high / least if least else math.inf)


def median_interval(values: Sequence[float], confidence: float = (1 + CONFIDENCE) / 2) -> tuple[float, float]:
    """Return where the true median lies, whatever the distribution; 0 and infinity if there are too few values.

    As many values as coin tosses show heads lie below it: that tells which two enclose it.
    """
    ordered, count = sorted(values), len(values)
    outside, inner = 2 / 2**count, 0
    while outside <= 1 - confidence:
        inner += 1
        outside += 2 * math.comb(count, inner) / 2**count
    return (ordered[inner - 1], ordered[count - inner]) if inner else (0.0, math.inf)
