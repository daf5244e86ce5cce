"""Doubts about a report: contradictions between what it says, the registry and the history of the repository.

Nobody can prove from a file that a run took place. These are contradictions that a report written or changed by hand
may have, and one that `report.py` wrote has not.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from kpt_core import backends
from kpt_core.selection import REFERENCE
from kpt_optimize.devices.products import PRODUCTS

from .aot.chips import CHIPS
from .report import DECLARED, Report

#: In a folder of reports: the names of those whose commit the history has lost, so that nobody can run it again.
GONE = "commits-gone.txt"
NOT_THERE = "is not in the history"
#: Of a kernel in one dtype; the suite has about two thousand.
MOST_CHECKS = 20_000
_COLUMNS = re.compile("|".join((DECLARED, "all", r"(?:b?float|u?int|complex)\d+\w*", "bool")))
#: What the versions of a run on a device name, by torch's type of it: one of these.
_TOOLKITS = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}


class Registered(Protocol):
    """A kernel, as `support.claimed` tells of it."""

    @property
    def op(self) -> str:
        """Return the name of its op."""

    @property
    def backend(self) -> str:
        """Return the name of its backend."""

    @property
    def function(self) -> str:
        """Return what computes its forward."""


def doubts(report: Report, claims: Iterable[Registered], repository: Path) -> Iterator[str]:
    """Yield a sentence for each thing that speaks against a report.

    Args:
        report: of a run.
        claims: every kernel that is registered.
        repository: in whose history the report's commit is looked for; outside of git that is left out.
    """
    yield from _of_time(report, repository)
    yield from _of_place(report)
    yield from _of_kernels(report, [*claims])


def _of_time(report: Report, repository: Path) -> Iterator[str]:
    date = datetime.fromisoformat(report.date)
    if date.tzinfo is None or date > datetime.now(UTC) + timedelta(hours=1):
        yield f"its date {report.date} is none in UTC, or has not come yet"
        return
    if report.commit is None:
        yield "it names no commit"
    elif report.commit.endswith("-dirty"):
        yield f"files differed from commit {report.commit.removesuffix('-dirty')}"
    elif not re.fullmatch("[0-9a-f]{7,40}", report.commit):
        yield f"{report.commit!r} is the name of no commit"
    elif _git(repository, "rev-parse", "--is-shallow-repository") == "false":  # else nobody knows what came before
        if _git(repository, "merge-base", "--is-ancestor", report.commit, "HEAD") is None:
            yield f"commit {report.commit} {NOT_THERE}"
        elif date < datetime.fromisoformat(str(_git(repository, "show", "-s", "--format=%cI", report.commit))):
            yield f"its date {report.date} is before its commit"


def _git(repository: Path, *words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _of_place(report: Report) -> Iterator[str]:
    columns = {column for columns in report.kernels.values() for column in columns}
    if report.level == "compiled":
        if report.chip or columns - {DECLARED, *CHIPS}:
            yield f"what is compiled has chips as columns and runs on none; got {_some(columns)} on {report.chip!r}"
        for backend in backends().values():
            if backend.name == report.backend and backend.chips and (foreign := columns - {*backend.chips, DECLARED}):
                yield f"backend {report.backend} is not for {_some(foreign)}"
        return
    if bad := sorted(column for column in columns if not _COLUMNS.fullmatch(column)):
        yield f"a run has dtypes as columns; got {_some(bad)}"
    if report.level == "interpreted":
        if report.device != "cpu":
            yield f"interpreters run on a CPU; got {report.chip!r} on {report.device!r}"
        return
    types = next((each.device_types for each in backends().values() if each.name == report.backend), ())
    if types and report.device not in types:
        yield f"backend {report.backend} runs on {' or '.join(types)}; got {report.device!r}"
    if report.device == "cpu" and not re.fullmatch(r".+ \(.+\)", report.chip):
        yield f"a CPU's name ends with its instruction sets in brackets; got {report.chip!r}"
    toolkits = _TOOLKITS.get(report.device, ())
    if toolkits and ("+cpu" in report.versions.get("torch", "") or not {*toolkits} & {*report.versions}):
        yield f"torch {report.versions.get('torch')} without {' or '.join(toolkits)} runs nothing on {report.device}"
    makers = {product.split()[0] for product in PRODUCTS.get(report.backend, ())}
    if not report.chip or (makers and report.chip.split()[0] not in makers):
        yield f"{report.chip!r} is no chip of backend {report.backend}"


def _of_kernels(report: Report, claims: Sequence[Registered]) -> Iterator[str]:
    if not report.kernels:
        yield "it is of no kernel"
    ops = {claim.op for claim in claims}
    own = {_package(claim.function) for claim in claims if claim.backend == report.backend}
    for name, columns in report.kernels.items():
        op, _, function = name.partition(" ")
        if own and (op not in ops or _package(function) not in own):
            yield f"backend {report.backend} has no kernel {function!r} of {op!r}"
        for column, counts in columns.items():
            numbers = [value for value in counts.values() if isinstance(value, int)]
            if (
                min(numbers, default=0) < 0
                or sum(counts[kind] for kind in ("passed", "refused", "failed")) > MOST_CHECKS
            ):
                yield f"{name} has more checks in {column} than the suite, or fewer than none: {counts}"
            if counts["failed"] and not counts.get("failing") and report.level != "compiled":
                yield f"{name} failed in {column}, and nothing is named that did"


def _package(function: str) -> str:
    return function if function == REFERENCE else function.partition(".")[0]


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
