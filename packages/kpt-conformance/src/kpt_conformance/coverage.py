"""What the suite exercises of what an op documents, and how often.

    python -m kpt_conformance.coverage [--json FILE]

prints it for all installed ops, as their tables and the suite's checks plan it, and exits with 1 if something that is
documented is never exercised. `pytest --kpt-backend=NAME --kpt-coverage=FILE` writes what a run did exercise.
"""

import argparse
import inspect
import json
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch

import kpt_core
from kpt_optimize.cases import Case, CaseTable, Domain, Sizes, case_tables

from .checks.catalog import CHECKS
from .drawing import FAMILY, Meeting, completions, covered, drawn_cases, same, usual_meetings
from .extent import extent_of
from .trial import Trial

#: What of a coverage is written as it is.
_PLAIN = ("dtypes", "options", "sizes", "usual", "families", "parameters")
Checks = Iterable[Callable[[Trial], None]]

#: Ranges of a size that are told apart, and whether one of them is within what may be drawn.
BUCKETS: dict[str, Callable[[int], bool]] = {
    "0": lambda size: size == 0,
    "1": lambda size: size == 1,
    "2 to 64": lambda size: 1 < size <= 64,
    "past 64": lambda size: 64 < size <= 128,
    "past 128": lambda size: 128 < size <= 256,
    "past 256": lambda size: 256 < size <= 32767,
    "past 32767": lambda size: size > 32767,
}


@dataclass(slots=True)
class Coverage:
    """How many trials exercised each thing that an op documents; what has none is there with a zero.

    Attributes:
        in_dtypes: for each option of the table's domain, each value in each dtype.
        pairs: of values of options, those that the domain allows.
        threes: likewise, three at once. None has to be exercised: an op may have too many.
        sizes: for each dimension of the domain, ranges.
        usual: pairs of the domain's usual sizes, and of these and options that are `sized`, those that it allows.
        families: of models, that the domain names.
        parameters: for each parameter of the op's own signature, what a table can't forget: both values of a bool, an
            optional one given and not given, a number at its default and at another, all values of a string.
    """

    table: CaseTable
    dtypes: Counter[str] = field(default_factory=Counter)
    options: dict[str, Counter[str]] = field(default_factory=dict)
    in_dtypes: dict[str, Counter[str]] = field(default_factory=dict)
    pairs: Counter[Meeting] = field(default_factory=Counter)
    threes: Counter[Meeting] = field(default_factory=Counter)
    sizes: dict[str, Counter[str]] = field(default_factory=dict)
    usual: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    parameters: dict[str, Counter[str]] = field(default_factory=dict)
    checks: Counter[str] = field(default_factory=Counter)
    _met: dict[str, tuple[set[Meeting], set[Meeting]]] = field(default_factory=dict)
    _labels: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, check: str, case: Case, dtype: torch.dtype) -> None:
        """Count one trial."""
        self.checks[check] += 1
        self.dtypes[_short(dtype)] += 1
        domain = _domain(self.table)
        values = {**_defaults(self.table), **case.sizes}
        for name, documented in domain.options.items():
            value = values.get(name, documented[0])
            known = [_short(each) for each in documented if same(each, value)]
            self.options[name].update(known)
            self.in_dtypes[name].update(f"{each} in {_short(dtype)}" for each in known)
        if case.name not in self._met:
            pairs, threes = (covered(domain, values, together) for together in (2, 3))
            self._met[case.name] = pairs & self.pairs.keys(), threes & self.threes.keys()
        pairs, threes = self._met[case.name]
        self.pairs.update(pairs)
        self.threes.update(threes)
        self.usual.update(_together(each) for each in usual_meetings(domain) if _has(values, each))
        if case.name.startswith(FAMILY):
            self.families[case.name.removeprefix(FAMILY)] += 1
        for name in domain.sizes:
            size = values.get(name)
            self.sizes[name].update(bucket for bucket, holds in BUCKETS.items() if size is not None and holds(size))
        if not case.model:  # of a real model's shapes the arguments take seconds to make
            if case.name not in self._labels:
                self._labels[case.name] = _labels(self.table, self.table.arguments(case))
            for name, label in self._labels[case.name].items():
                self.parameters[name][label] += 1

    def unexercised(self) -> list[str]:
        """Return a sentence for each thing that is documented and has no trial."""
        found = [f"dtype {dtype} is never tried" for dtype, count in self.dtypes.items() if not count]
        never = set(_zeros(self.options))
        found += [f"{name} is never {value}" for name, value in _zeros(self.options)]
        for name, value in _zeros(self.in_dtypes):
            option, _, dtype = value.rpartition(" in ")
            # What is seldom is tried once, in one dtype.
            if (name, option) not in never and self.dtypes[dtype] and name not in _domain(self.table).seldom:
                found.append(f"{name} is never {value}")
        for (one, here), (other, there) in (pair for pair, count in self.pairs.items() if not count):
            first, second = (_domain(self.table).options[name][at] for name, at in ((one, here), (other, there)))
            found.append(f"{one}={_short(first)} and {other}={_short(second)} never come together")
        found += [f"{pair} never come together" for pair, count in self.usual.items() if not count]
        found += [f"{family} is never tried" for family, count in self.families.items() if not count]
        found += [f"size {name} is never {bucket}" for name, bucket in _zeros(self.sizes)]
        found += [f"parameter {name} of the op is never {value}" for name, value in _zeros(self.parameters)]
        single = ((name, *values) for name, values in self.parameters.items() if len(values) == 1)
        found += [f"parameter {name} of the op is always {value}" for name, value in single]
        found += [f"check {name} is never run" for name, count in self.checks.items() if not count]
        return [f"{self.table.op}: {sentence}" for sentence in found]

    def to_json(self) -> dict[str, Any]:
        """Return all counts."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        met = {"pairs": _met(self.pairs), "threes": _met(self.threes)}
        return plain | met | {"checks": self.checks, "unexercised": self.unexercised()}


def nothing_of(table: CaseTable, checks: Checks, dtypes: Iterable[torch.dtype] | None = None) -> Coverage:
    """Return a coverage in which everything that the op documents has no trial yet."""
    domain = _domain(table)
    none = Coverage(table)
    none.dtypes.update({_short(dtype): 0 for dtype in dtypes or (*table.dtypes, *table.rare)})
    none.options = {n: Counter({_short(value): 0 for value in values}) for n, values in domain.options.items()}
    none.in_dtypes = {
        n: Counter({f"{_short(value)} in {dtype}": 0 for value in values for dtype in none.dtypes})
        for n, values in domain.options.items()
    }
    none.pairs.update(dict.fromkeys(completions(domain), 0))
    none.threes.update(dict.fromkeys(completions(domain, 3), 0))
    none.sizes = {name: Counter(dict.fromkeys(_within(sizes), 0)) for name, sizes in domain.sizes.items()}
    none.usual.update({_together(each): 0 for each in usual_meetings(domain)})
    none.families.update(dict.fromkeys(domain.families, 0))
    none.parameters = {n: Counter(dict.fromkeys(labels, 0)) for n, labels in _documented(table).items()}
    none.checks.update({check.__name__: 0 for check in checks})
    return none


def planned(table: CaseTable, checks: Checks) -> Coverage:
    """Return what the suite plans for an op on a CPU, for a kernel that takes everything."""
    checks = tuple(checks)
    coverage = nothing_of(table, checks)
    cases = (*table.cases, *drawn_cases(table))
    for check in checks:
        for case, dtype in extent_of(check).trials(cases, table.dtypes, table.rare):
            if not case.large:
                coverage.add(check.__name__, case, dtype)
    return coverage


def labels_of(trial: Trial) -> tuple[str, ...]:
    """Return what a trial meets of its op's domain, each as a few words, by which refusals are told."""
    family = (trial.case.name,) if trial.case.name.startswith(FAMILY) else ()
    return (f"dtype {_repr(trial.dtype)}", *_of_case(trial), *family)


def _of_case(trial: Trial) -> Iterator[str]:
    domain = _domain(trial.table)
    values = _defaults(trial.table) | dict(trial.case.sizes)
    for name, documented in domain.options.items():
        value = values.get(name, documented[0])
        if any(same(each, value) for each in documented):
            yield f"{name}={_repr(value)}"
    for name in domain.sizes:
        size = values.get(name)
        if isinstance(size, int):
            yield from (f"{name} {bucket}" for bucket, holds in BUCKETS.items() if holds(size))


def _repr(value: object) -> str:
    return repr(value).removeprefix("torch.")


def _together(meeting: Mapping[str, Any]) -> str:
    return " and ".join(f"{name}={_short(value)}" for name, value in meeting.items())


def _has(values: Mapping[str, Any], meeting: Mapping[str, Any]) -> bool:
    return all(name in values and same(values[name], value) for name, value in meeting.items())


def _domain(table: CaseTable) -> Domain:
    return table.domain or Domain()


def _defaults(table: CaseTable) -> dict[str, Any]:
    parameters = inspect.signature(table.build).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _within(sizes: Sizes) -> Iterator[str]:
    # A size in the middle of each range says whether the range can be met at all.
    for (bucket, holds), least in zip(BUCKETS.items(), (0, 1, 2, 65, 129, 257, 32768), strict=True):
        if sizes.least <= least <= sizes.most or (sizes.many is not None and holds(sizes.many)):
            yield bucket


def _documented(table: CaseTable) -> dict[str, tuple[str, ...]]:
    """What has to be seen of each parameter of the op's signature, from the signature itself."""
    reference = kpt_core.get_op(table.op).reference
    hints = typing.get_type_hints(reference)
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in inspect.signature(reference).parameters.items():
        hint = hints[name]
        if NoneType in typing.get_args(hint):
            found[name] = ("None", "given")
        elif hint is bool:
            found[name] = ("False", "True")
        elif hint is str:
            found[name] = tuple(map(_short, _domain(table).options.get(name, ("a value of the domain",))))
        elif hint in (int, float):
            found[name] = () if parameter.default is parameter.empty else ("its default", "another")
    return found


def _labels(table: CaseTable, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Under which of `_documented` each argument of a call falls."""
    parameters = inspect.signature(kpt_core.get_op(table.op).reference).parameters
    found = {}
    for name, labels in _documented(table).items():
        default = parameters[name].default
        value = arguments.get(name, default)
        given, usual = ("None" if value is None else "given"), ("its default" if value == default else "another")
        found[name] = given if given in labels else usual if usual in labels else _short(value)
    return found


def _zeros(counts: Mapping[str, Counter[str]]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, values in counts.items() for value, count in values.items() if not count)


def _met(counts: Mapping[Meeting, int]) -> dict[str, int]:
    return {"exercised": sum(1 for count in counts.values() if count), "allowed": len(counts)}


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> int:
    """Print what is planned for all installed ops; 1 if something is never exercised.

    An op whose table has no domain is listed, and judged by its signature alone.
    """
    parser = argparse.ArgumentParser(prog="python -m kpt_conformance.coverage", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts there")
    asked = parser.parse_args(arguments)
    found = {op: planned(table, CHECKS) for op, table in case_tables().items()}
    sys.stdout.write("\n\n".join(map(text_of, found.values())) + "\n")
    if asked.json:
        asked.json.write_text(json.dumps({op: each.to_json() for op, each in found.items()}, indent=1) + "\n")
    return 1 if any(each.unexercised() for each in found.values()) else 0


def text_of(coverage: Coverage) -> str:
    """Return the counts of one op as lines of text."""
    made = coverage.to_json()
    rows = [("dtypes", "", _counts(coverage.dtypes))]
    for kind in ("pairs", "threes"):
        exercised, allowed = made[kind].values()
        rows.append((f"{kind} of options", "", f"{exercised} of {allowed} that are allowed"))
    usual, families = coverage.usual, coverage.families
    rows.append(("pairs of usual sizes", "", f"{sum(map(bool, usual.values()))} of {len(usual)} that are allowed"))
    rows.append(("families", "", _counts(families)))
    for kind in ("options", "sizes", "parameters"):
        rows += [(kind.removesuffix("s"), name, _counts(values)) for name, values in made[kind].items()]
    rows.append(("checks", "", _counts(coverage.checks)))
    lines = [f"  {f'{kind} {name}'.strip():28} {counts}" for kind, name, counts in rows]
    domain = "" if coverage.table.domain else " (its table has no domain)"
    return "\n".join([f"{coverage.table.op}: trials of each{domain}", *lines, *coverage.unexercised()])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
