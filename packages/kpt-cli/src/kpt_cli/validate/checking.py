"""Checking a platform report: everything that is derived is derived again from the files, without torch."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from .reading import (
    DAMAGED,
    HARDWARE,
    LEAST_ROUNDS,
    MANIFEST,
    STEPS,
    SUMMARY,
    UNSTEADY,
    Document,
    Figure,
    case_of,
    contents,
    ending,
    files_of,
    median_of,
    read_figures,
    read_hardware,
    read_steps,
    read_suite,
    summary,
)

NOTHING_RAN = 5  #: pytest's exit code


def faults(folder: Path) -> list[str]:
    """Return what is wrong with a report, a sentence each with file and figure; `CliError` if it is no report."""
    steps = read_steps(folder)
    found = [*_seal(folder), *_steps(folder, steps)]
    try:
        read_hardware(folder)
    except DAMAGED as error:
        found.append(_damaged(HARDWARE, error))
    for file in files_of(steps, "junit-"):
        found += _read_of(file, lambda name: _suite(folder, name))
    for file in files_of(steps, "bench-"):
        found += _read_of(file, lambda name: _benchmark(folder, name))
    return found + list(_summary(folder))


def _read_of(file: str, check: Callable[[str], Iterator[str]]) -> list[str]:
    try:
        return list(check(file))
    except DAMAGED as error:
        return [_damaged(file, error)]


def _damaged(file: str, error: Exception) -> str:
    return f"{file}: is damaged: {type(error).__name__}: {error}"


def _seal(folder: Path) -> Iterator[str]:
    """Compare the files with the manifest, which is written last."""
    file = folder / MANIFEST
    if not file.is_file():
        yield f"{MANIFEST}: is missing: the report is unfinished; run `kpt validate platform` again in a new folder"
        return
    try:
        lines = [line.split("  ", 1) for line in file.read_text(encoding="utf-8").splitlines()]
        sealed = {name: digest for digest, name in lines}
    except ValueError as error:
        yield _damaged(MANIFEST, error)
        return
    there = contents(folder)
    yield from (f"{name}: is missing, though {MANIFEST} names it" for name in sealed if name not in there)
    for name in there:
        if name not in sealed:
            yield f"{name}: was added: {MANIFEST} does not name it"
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != sealed[name]:
            yield f"{name}: was changed after the report was sealed: its SHA-256 is not that of {MANIFEST}"


def _steps(folder: Path, steps: Document) -> Iterator[str]:
    for step in steps["steps"]:
        name = step["name"]
        if step["ended"] in (None, "interrupted"):
            yield f"{STEPS}: {name} did not end: the report is unfinished"
            continue
        if step["ended"] == "limit":
            yield f"{STEPS}: {name} was stopped at its limit of {step['limit']:g} s; give it more with --limit"
        elif step["exit_code"] == NOTHING_RAN and name.startswith("suite-"):
            yield f"{STEPS}: {name} ran nothing: pytest's exit code is {NOTHING_RAN}"
        elif step["exit_code"] != 0:
            yield f"{STEPS}: {name} failed with exit code {step['exit_code']}; {step['log']} says why"
        for file in step["files"]:
            if not (folder / file).is_file():
                yield f"{file}: is missing: {name} should have left it"
        try:
            last = (folder / step["log"]).read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        except OSError:
            yield f"{step['log']}: is missing: it is the log of {name}"
            continue
        if last != [ending(step)]:
            yield f"{step['log']}: ends with {last[0] if last else 'nothing'!r}, expected {ending(step)!r} of {STEPS}"
    for name in steps["only"]:
        if name in steps["left_out"]:
            yield f"{STEPS}: {name} was asked for and left out: {steps['left_out'][name]}"


def _suite(folder: Path, file: str) -> Iterator[str]:
    suite = read_suite(folder, file)
    if not suite.passed and not suite.failed:
        yield f"{file}: no test ran: {suite.skipped.total()} were skipped"
    if suite.failed:
        more = f" and {len(suite.failed) - 1} more" if len(suite.failed) > 1 else ""
        yield f"{file}: {suite.failed[0]}{more} failed"
    for name in suite.unexplained:
        yield f"{file}: {name} was skipped without a reason"


def _benchmark(folder: Path, file: str) -> Iterator[str]:
    figures = read_figures(folder, file)
    if not figures:
        yield f"{file}: has no figures"
    for figure in figures:
        yield from _figure(figure)
    yield from _peers(folder, file)


def _figure(figure: Figure) -> Iterator[str]:
    rounds = len(figure.values)
    if rounds < LEAST_ROUNDS:
        yield f"{figure}: {rounds} rounds; a figure needs at least {LEAST_ROUNDS}"
        return
    median, noise = median_of(figure.values)
    if not math.isclose(noise, figure.noise, rel_tol=1e-9, abs_tol=1e-12):
        yield f"{figure}: its noise is {figure.noise:.6g}, that of its {rounds} times is {noise:.6g}"
    if figure.value is None:
        if noise <= UNSTEADY:
            yield f"{figure}: is given as too noisy, and its {rounds} times give {median:.6g} ± {noise:.1%}"
    elif not math.isclose(median, figure.value, rel_tol=1e-9):
        yield f"{figure}: is {figure.value:.6g}, the median of its {rounds} times is {median:.6g}"


def _peers(folder: Path, file: str) -> Iterator[str]:
    """Look at the seconds of peers, which follow from KPT's and the ratio."""
    for line in json.loads((folder / file).read_text(encoding="utf-8"))["lines"]:
        own, *others = line.get("results", [{}])
        for each in others:
            given, factors = each["seconds"], (own["seconds"], each["gain"])
            expected = None if None in factors else math.prod(factors)
            same = given == expected
            if not same and given is not None and expected is not None:
                same = math.isclose(given, expected, rel_tol=1e-9)
            if not same:
                where = f"{file}: {case_of(line)}, {each['implementation']}"
                yield f"{where}: its seconds are {given}, KPT's times the ratio are {expected}"


def _summary(folder: Path) -> Iterator[str]:
    """Name the first line of the summary that the files don't give."""
    file = folder / SUMMARY
    if not file.is_file():
        yield f"{SUMMARY}: is missing"
        return
    try:
        expected = summary(folder).splitlines()
    except DAMAGED:  # which is told of the damaged file
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(lines, expected, strict=False)) if a != b), min(len(lines), len(expected))
        )
        has, gives = ([*text, "nothing"][min(at, len(text))] for text in (lines, expected))
        yield f"{SUMMARY}: is not what the files say: line {at + 1} is {has!r}, the files give {gives!r}"
