"""Cases that nobody wrote: drawn from what an op documents, the same ones in every run."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from kpt_optimize.cases import Case, CaseTable, Domain

#: How the names of cases begin that are there for a family of models.
FAMILY = "family: "
#: Some options, and the place of a value of each.
Meeting = tuple[tuple[str, int], ...]
#: What stays small: odd, prime, one past a power of two, one short of one.
_SMALL = (1, 2, 3, 5, 7, 13, 17, 31, 33)
#: One past a tile or a threshold.
_LARGE = (65, 129, 257, 513)
#: What each dimension is in turn, whatever the others are.
_IN_TURN = (*_LARGE, 1)
#: The product of all sizes, so that a CPU takes a fraction of a second in float64, gradients included.
_WORK = 2_000_000
#: Second tiles of two dimensions at once, which end one past a tile of 128 or one short of it, or in its middle.
_TILES = (129, 255, 192, 257, 383)
#: What all others are at most where one is large beyond all: more in a width, of whose long sums there must be enough.
_FEW, _BESIDE_A_WIDTH = (3, 1, 2, 6), (65, 17, 3, 1, 2, 6)
_WORK_OF_A_WIDTH = 60_000_000
#: Beyond it a number counts something, and is no width.
_WIDEST = 2**15 - 1
#: Of a case that is there for three options alone.
_TINY = (2, 3, 5, 6, 7, 8, 13)
_TINY_WORK = 50_000
#: Options of a usual size that are drawn before the first ones are taken.
_TRIES = 50
#: Ways that are tried to fill a row for three options, and how many such rows there may be.
_FILLINGS, _MOST_ROWS = 8, 256


def drawn_cases(table: CaseTable) -> tuple[Case, ...]:
    """Cases of a table's domain: every pair of values of options, and each dimension past every tile in turn.

    Each pair that is allowed is in a case without a dimension of zero. On top come a case for each dimension that may
    be zero, in which it is; two for each that may be large beyond all others (one, if it counts something); one for
    every two dimensions, which both are past a tile; small cases in which three values meet that met in no other; one
    for each two usual sizes; and one for each family of models. Of all these but the zeros each is tried once. The same
    domain gives the same cases in every process.
    """
    return () if table.domain is None else _drawn(table.domain)


@cache
def _drawn(whole: Domain) -> tuple[Case, ...]:
    generator = random.Random(0)
    domain = _often(whole)
    names = list(domain.sizes)
    rows = pairwise(domain)
    while len(rows) < len(_IN_TURN) * len(names):
        rows.append(_any_row(domain, generator))
    drawn: list[tuple[dict[str, Any], dict[str, int], int | None]] = []
    for number, options in enumerate(rows):
        turn, whose = divmod(number, max(len(names), 1))
        wanted = {names[whose]: _IN_TURN[turn % len(_IN_TURN)]} if names else {}
        drawn.append((options, _sizes(domain, options, wanted, generator), None))
    for name in (name for name in names if domain.sizes[name].least == 0):
        options = _any_row(domain, generator)
        drawn.append((options, _sizes(domain, options, {name: 0}, generator), None))
    first = {name: values[0] for name, values in domain.options.items()}
    once = itertools.count()
    for name, many in ((name, sizes.many) for name, sizes in domain.sizes.items() if sizes.many is not None):
        if many > _WIDEST:
            few = _few(domain, first, _FEW, {name: many})
            drawn += [(first, few, 0), (first, few, 1)]  # the second dtype's rows are half as long
            continue
        for options in (first, _any_row(domain, generator)):
            # Not the first dtype, float32: what a long sum loses shows in those of half its length.
            drawn.append(
                (options, _few(domain, options, _BESIDE_A_WIDTH, {name: many}, _WORK_OF_A_WIDTH), 1 + next(once) % 2)
            )
    for pair in itertools.combinations(names, 2):
        wanted = dict(zip(pair, generator.sample(_TILES, 2), strict=True))
        for options in (_any_row(domain, generator), first):
            with suppress(ValueError):  # so large no two may be with some options
                drawn.append((options, _sizes(domain, options, wanted, generator), next(once)))
                break
    for number, options in enumerate(_threes(domain, [options for options, _, _ in drawn], generator)):
        drawn.append((options, _sizes(domain, options, {}, generator, tiny=True), number))
    for number, row in enumerate(_usual(whole)):
        options = {name: row.pop(name) for name in whole.options}
        # Nor here the first dtype: of long sums in float32 the order of a library's terms is what tells.
        drawn.append((options, row, 1 + number % 2))
    for number, options in enumerate(_pairs_of_seldom(whole, [options for options, _, _ in drawn])):
        drawn.append((options, _sizes(whole, options, {}, generator, tiny=True), number))
    families = tuple(
        Case(name=f"{FAMILY}{name}", sizes=sizes, drawn=True, once=number)
        # Not the first dtype: models are in 16 bits.
        for number, (name, sizes) in zip(itertools.cycle((1, 2)), whole.families.items(), strict=False)
    )
    numbered = tuple(
        Case(name=_name(number, sizes, options, whole), sizes={**sizes, **options}, drawn=True, once=once)
        for number, (options, sizes, once) in enumerate(drawn)
    )
    return numbered + families


@cache
def _often(domain: Domain) -> Domain:
    """A domain without the options that are `seldom`."""
    kept = {name: values for name, values in domain.options.items() if name not in domain.seldom}
    first = {name: domain.options[name][0] for name in domain.seldom}
    return replace(
        domain, options=kept, allowed=lambda values: domain.allowed({**first, **values}), seldom=(), sized=()
    )


def _pairs_of_seldom(domain: Domain, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that have every pair which is allowed and is in none of the given rows."""
    wholes = completions(domain)
    left = set(wholes).difference(*(covered(domain, row) for row in rows))
    found: list[dict[str, Any]] = []
    for pair, whole in wholes.items():
        if pair in left:
            found.append(_filled(domain, pair, whole, left))
            left -= covered(domain, found[-1])
    return found


def _few(
    domain: Domain, options: Mapping[str, Any], some: tuple[int, ...], many: dict[str, int], work: float = math.inf
) -> dict[str, int]:
    """A large size, and few of all else that are allowed together, the first of `some` where that is not too much."""
    every = [[few for few in some if each.least <= few <= each.most] for each in domain.sizes.values()]
    rows = (dict(zip(domain.sizes, row, strict=True)) for row in itertools.product(*every))
    allowed = (row | many for row in rows if domain.allowed({**options, **row}))
    return next(row for row in allowed if math.prod(row.values()) <= work)


def _name(number: int, sizes: Mapping[str, int], options: Mapping[str, Any], domain: Domain) -> str:
    """The number and the sizes; options only where there are no sizes."""
    shown = sizes or {name: value for name, value in options.items() if value != domain.options[name][0]}
    return f"drawn {number}: {', '.join(f'{name} {value}' for name, value in shown.items())}"


def _sizes(
    domain: Domain,
    options: Mapping[str, Any],
    wanted: Mapping[str, int],
    generator: random.Random,
    *,
    tiny: bool = False,
) -> dict[str, int]:
    """A size for each dimension: as wanted, as far as it is allowed, and whatever for the others."""
    # The largest meets few of everything else: then a single expert has most of the rows, for instance.
    lonely = max(wanted.values(), default=0) > 256
    for attempt in itertools.count():
        # Two large ones now and then, if that is not too much work; what is wanted is given up last.
        some: tuple[int, ...] = (
            _SMALL[:4] if lonely and attempt < 100 else _SMALL if attempt % 4 else (*_SMALL, *_LARGE[:2])
        )
        some = _TINY if tiny else some
        sizes = {}
        for name, allowed in domain.sizes.items():
            drawn = generator.choice(some)
            if name in wanted:
                drawn = wanted[name] if attempt < 200 else generator.choice(_LARGE)
            sizes[name] = min(max(drawn, allowed.least), allowed.most)
        if math.prod(sizes.values()) <= (_TINY_WORK if tiny else _WORK) and domain.allowed({**options, **sizes}):
            return sizes
        if attempt == 1000:
            raise ValueError(f"no sizes are allowed together with {dict(options)}: see the domain's `allowed`")
    raise AssertionError


@cache
def _usual_meetings(domain: Domain) -> Mapping[Meeting, dict[str, Any]]:
    """For each two usual sizes that are allowed together, with each value of each option that is `sized`, a whole row.

    Where a value is not allowed with two, it meets each of them, as two sizes do where none is `sized`.
    """
    every = _of_usual(domain)
    threes, pairs = (
        {
            meeting: row
            for meeting, row in completions(every, together).items()
            if all(place or name in domain.sized for name, place in meeting)
            and sum(name in domain.sized for name, _ in meeting) == together - 2
        }
        for together in (3, 2)
    )
    alone = {
        pair: row
        for pair, row in completions(every).items()
        if sum(name in domain.sized for name, _ in pair) == 1
        and all(place or name in domain.sized for name, place in pair)
        and not any({*pair} <= {*three} for three in threes)
    }
    return {**threes, **pairs, **alone}


@cache
def usual_meetings(domain: Domain) -> tuple[dict[str, Any], ...]:
    """Return what must meet in a case, by names: two usual sizes, and with them values of options that are `sized`."""
    options = _of_usual(domain).options
    return tuple({name: options[name][place] for name, place in meeting} for meeting in _usual_meetings(domain))


@cache
def _of_usual(domain: Domain) -> Domain:
    """A domain whose options are the usual sizes, behind a small one, and what each of them meets."""

    def allowed(row: Mapping[str, Any]) -> bool:
        return domain.allowed({**first, **row})

    first = {name: values[0] for name, values in domain.options.items()}
    small = _small(domain)
    sizes = {name: (small[name], *each.usual) for name, each in domain.sizes.items() if each.usual}
    first = {**small, **first}
    return Domain(options={**sizes, **{name: domain.options[name] for name in domain.sized}}, allowed=allowed)


def _small(domain: Domain) -> dict[str, int]:
    """Few of everything, that are allowed with the first options."""
    return _few(domain, {name: values[0] for name, values in domain.options.items()}, _FEW, {})


def _usual(domain: Domain) -> list[dict[str, Any]]:
    """Rows of sizes and options that together have whatever is usual and must meet; the rest is small."""
    sizes, generator = _of_usual(domain), random.Random(1)
    found: list[dict[str, Any]] = []
    left = set(_usual_meetings(domain))
    for meeting, whole in _usual_meetings(domain).items():
        if meeting in left:
            row = _filled(sizes, meeting, whole, left)
            left -= covered(sizes, row) | covered(sizes, row, 3)
            # What is neither usual nor `sized` is small.
            found.append(_any_options(domain, {**_small(domain), **row}, generator))
    return found


def _any_options(domain: Domain, chosen: Mapping[str, Any], generator: random.Random) -> dict[str, Any]:
    """A row with what is chosen, and options at random as far as these are allowed together, else the first ones."""
    for _ in range(_TRIES):
        row = {name: generator.choice(values) for name, values in domain.options.items()} | dict(chosen)
        if domain.allowed({name: row[name] for name in domain.options}) and domain.allowed(row):
            return row
    return {name: values[0] for name, values in domain.options.items()} | dict(chosen)


@cache
def completions(domain: Domain, together: int = 2) -> Mapping[Meeting, dict[str, Any]]:
    """For each pair that is allowed, or each three, a whole row that has it.

    Up to two other options may depart from their first.
    """
    found: dict[Meeting, dict[str, Any]] = {}
    for names in itertools.combinations(domain.options, together):
        for places in itertools.product(*(range(len(domain.options[name])) for name in names)):
            meeting = tuple(zip(names, places, strict=True))
            if together > 2 and any(pair not in completions(domain) for pair in itertools.combinations(meeting, 2)):
                continue
            row = next((r for r in _around(domain, dict(meeting)) if domain.allowed(r)), None)
            if row is not None:
                found[meeting] = row
    return found


def _around(domain: Domain, chosen: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Rows with these values: the other options have their first, or one or two of them another."""
    row = {name: values[chosen.get(name, 0)] for name, values in domain.options.items()}
    others = [name for name in domain.options if name not in chosen]
    for count in range(3):
        for names in itertools.combinations(others, count):
            for values in itertools.product(*(domain.options[name][1:] for name in names)):
                yield {**row, **dict(zip(names, values, strict=True))}


def covered(domain: Domain, row: Mapping[str, Any], together: int = 2) -> set[Meeting]:
    """The pairs or threes that a case's options have; an option that it does not name has its first value."""
    places = []
    for name, values in domain.options.items():
        value = row.get(name, values[0])
        places += [(name, place) for place, each in enumerate(values) if same(each, value)]
    return set(itertools.combinations(places, together))


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


def _threes(domain: Domain, rows: list[dict[str, Any]], generator: random.Random) -> list[dict[str, Any]]:
    """Rows that have every three values which are allowed together and are in none of the given rows."""
    wholes = completions(domain, 3)
    left = set(wholes).difference(*(covered(domain, row, 3) for row in rows))
    found: list[dict[str, Any]] = []
    for three, whole in wholes.items():
        if three in left and len(found) < _MOST_ROWS:
            fillings = [_any_around(domain, three, whole, generator) for _ in range(_FILLINGS)]
            found.append(max(fillings, key=lambda row: len(covered(domain, row, 3) & left)))
            left -= covered(domain, found[-1], 3)
    return found


def _any_around(domain: Domain, kept: Meeting, row: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """A row whose options are at random, as far as that is allowed, but for those that are kept."""
    others = [name for name in domain.options if name not in dict(kept)]
    for name in generator.sample(others, len(others)):
        changed = {**row, name: generator.choice(domain.options[name])}
        row = changed if domain.allowed(changed) else row
    return row


def _filled(domain: Domain, meeting: Meeting, row: dict[str, Any], left: set[Meeting]) -> dict[str, Any]:
    """A row with a pair or three, whose other options take in turn the value that has most of what is left.

    Until none gains.
    """
    most = max(map(len, left))

    def gained(row: dict[str, Any]) -> int:
        return sum(len(covered(domain, row, together) & left) for together in range(2, most + 1))

    gain = -1
    while (now := gained(row)) > gain:
        gain = now
        for name in (each for each in domain.options if each not in dict(meeting)):
            changed = ({**row, name: value} for value in domain.options[name])
            row = max(filter(domain.allowed, changed), key=gained)
    return row


def _any_row(domain: Domain, generator: random.Random) -> dict[str, Any]:
    """Allowed options at random."""
    for _ in range(1000):
        row = {name: generator.choice(values) for name, values in domain.options.items()}
        if domain.allowed(row):
            return row
    return {name: values[0] for name, values in domain.options.items()}
