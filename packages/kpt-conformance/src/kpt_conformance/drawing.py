"""Cases that nobody wrote: drawn from what an op documents, the same ones in every run."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from kpt_core.cases import Case, CaseTable, Domain

Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two options, and the place of a value of each."""

#: What stays small: odd, prime, one past a power of two, one short of one.
_SMALL = (1, 2, 3, 5, 7, 13, 17, 31, 33)
#: One past a tile or a threshold.
_LARGE = (65, 129, 257, 513)
#: What each dimension is in turn, whatever the others are.
_IN_TURN = (*_LARGE, 1)
#: The product of all sizes, so that a CPU takes a fraction of a second in float64, gradients included.
_WORK = 2_000_000


def drawn_cases(table: CaseTable) -> tuple[Case, ...]:
    """Cases of a table's domain: every pair of values of options, and each dimension past every tile in turn.

    Each pair that is allowed is in a case without a dimension of zero. On top come a case for each dimension that may
    be zero, in which it is. The same domain gives the same cases in every process.
    """
    return () if table.domain is None else _drawn(table.domain)


@cache
def _drawn(domain: Domain) -> tuple[Case, ...]:
    generator = random.Random(0)
    names = list(domain.sizes)
    rows = pairwise(domain)
    while len(rows) < len(_IN_TURN) * len(names):
        rows.append(_any_row(domain, generator))
    drawn = []
    for number, options in enumerate(rows):
        turn, whose = divmod(number, max(len(names), 1))
        wanted = {names[whose]: _IN_TURN[turn % len(_IN_TURN)]} if names else {}
        drawn.append((options, _sizes(domain, options, wanted, generator)))
    for name in (name for name in names if domain.sizes[name].least == 0):
        options = _any_row(domain, generator)
        drawn.append((options, _sizes(domain, options, {name: 0}, generator)))
    return tuple(
        Case(name=_name(number, sizes, options, domain), sizes={**sizes, **options}, drawn=True)
        for number, (options, sizes) in enumerate(drawn)
    )


def _name(number: int, sizes: Mapping[str, int], options: Mapping[str, Any], domain: Domain) -> str:
    """The number and the sizes; options only where there are no sizes."""
    shown = sizes or {name: value for name, value in options.items() if value != domain.options[name][0]}
    return f"drawn {number}: {', '.join(f'{name} {value}' for name, value in shown.items())}"


def _sizes(
    domain: Domain, options: Mapping[str, Any], wanted: Mapping[str, int], generator: random.Random
) -> dict[str, int]:
    """A size for each dimension: as wanted, as far as it is allowed, and whatever for the others."""
    # The largest meets few of everything else: then a single expert has most of the rows, for instance.
    lonely = max(wanted.values(), default=0) > 256
    for attempt in itertools.count():
        # Two large ones now and then, if that is not too much work; what is wanted is given up last.
        some = _SMALL[:4] if lonely and attempt < 100 else _SMALL if attempt % 4 else (*_SMALL, *_LARGE[:2])
        sizes = {}
        for name, allowed in domain.sizes.items():
            drawn = generator.choice(some)
            if name in wanted:
                drawn = wanted[name] if attempt < 200 else generator.choice(_LARGE)
            sizes[name] = min(max(drawn, allowed.least), allowed.most)
        if math.prod(sizes.values()) <= _WORK and domain.allowed({**options, **sizes}):
            return sizes
        if attempt == 1000:
            raise ValueError(f"no sizes are allowed together with {dict(options)}: see the domain's `allowed`")
    raise AssertionError


@cache
def completions(domain: Domain) -> Mapping[Pair, dict[str, Any]]:
    """For each pair that is allowed a whole row that has it; up to two other options may depart from their first."""
    places = {name: range(len(values)) for name, values in domain.options.items()}
    found: dict[Pair, dict[str, Any]] = {}
    for (one, here), (other, there) in itertools.combinations(places.items(), 2):
        for first, second in itertools.product(here, there):
            row = next((r for r in _around(domain, {one: first, other: second}) if domain.allowed(r)), None)
            if row is not None:
                found[(one, first), (other, second)] = row
    return found


def _around(domain: Domain, chosen: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Rows with these values: the other options have their first, or one or two of them another."""
    row = {name: values[chosen.get(name, 0)] for name, values in domain.options.items()}
    others = [name for name in domain.options if name not in chosen]
    for count in range(3):
        for names in itertools.combinations(others, count):
            for values in itertools.product(*(domain.options[name][1:] for name in names)):
                yield {**row, **dict(zip(names, values, strict=True))}


def covered(domain: Domain, row: Mapping[str, Any]) -> set[Pair]:
    """The pairs that a case's options have; an option that it does not name has its first value."""
    places = []
    for name, values in domain.options.items():
        value = row.get(name, values[0])
        places += [(name, place) for place, each in enumerate(values) if same(each, value)]
    return set(itertools.combinations(places, 2))


def same(one: Any, other: Any) -> bool:
    """Whether two values of options are one: `True` is not 1."""
    return type(one) is type(other) and bool(one == other)


def pairwise(domain: Domain) -> list[dict[str, Any]]:
    """Rows of options that together have every pair that is allowed; greedy, hence few and not the fewest."""
    if len(domain.options) == 1:
        ((name, values),) = domain.options.items()
        return [{name: value} for value in values]
    rows = []
    wholes = completions(domain)
    left = set(wholes)
    for pair, whole in wholes.items():
        if pair in left:
            rows.append(_filled(domain, pair, whole, left))
            left -= covered(domain, rows[-1])
    return rows


def _filled(domain: Domain, pair: Pair, row: dict[str, Any], left: set[Pair]) -> dict[str, Any]:
    """A row with a pair, whose other options take in turn the value that has most of what is left, until none gains."""
    gain = -1
    while (now := len(covered(domain, row) & left)) > gain:
        gain = now
        for name in (each for each in domain.options if each not in dict(pair)):
            changed = ({**row, name: value} for value in domain.options[name])
            row = max(filter(domain.allowed, changed), key=lambda each: len(covered(domain, each) & left))
    return row


def _any_row(domain: Domain, generator: random.Random) -> dict[str, Any]:
    """Allowed options at random."""
    for _ in range(1000):
        row = {name: generator.choice(values) for name, values in domain.options.items()}
        if domain.allowed(row):
            return row
    return {name: values[0] for name, values in domain.options.items()}
