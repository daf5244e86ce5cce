"""Whether records, ratchet and support table are true, and about what is there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import kpt_core
from kpt_core import KptError, registry
from kpt_core.evidence import Claim, EvidenceError, Record, load
from kpt_core.files import write_whole

from .claims import registered
from .counting import Counts
from .history import history_of_sources
from .ratchet import levels_of, raised, ratchet_faults, read_ratchet, write_ratchet
from .recording import save
from .support import STALE, table
from .verification import Verification

_COMMAND = "python -m kpt_conformance.evidence write"


@dataclass(frozen=True, slots=True)
class Place:
    """Where what is made of the records lies.

    Attributes:
        support: the table.
        ratchet: the least levels.
    """

    support: Path = Path("docs/support.md")
    ratchet: Path = Path("evidence/ratchet.json")

    @property
    def options(self) -> str:
        """The options that name other files than the usual ones."""
        usual = Place()
        named = (("support", self.support, usual.support), ("ratchet", self.ratchet, usual.ratchet))
        return "".join(f" --{name} {path}" for name, path, other in named if path != other)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the records are worth.

    Attributes:
        records: those of kernels that there are, by their files, with their words in the table.
        believed: those of which nothing speaks against.
        faults: what is wrong, a sentence each.
        notes: what could not be looked up here.
        useless: files of records that prove nothing.
    """

    records: Mapping[Path, tuple[Record, str]] = field(default_factory=dict)
    believed: tuple[Record, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    useless: tuple[Path, ...] = ()


def judge(claims: Iterable[Claim]) -> Verdict:
    """Read the records of every package that offers something, and hold each to what is here."""
    by_key = {claim.key: claim for claim in claims}
    untrue = _untrue_libraries()
    faults, notes, useless = list(untrue.values()), dict[str, int](), list[Path]()
    records, believed = dict[Path, tuple[Record, str]](), list[Record]()
    counts = Counts()
    earlier = 0
    for folder in sorted({claim.folder for claim in by_key.values() if claim.folder is not None}):
        found, broken = load(folder)
        faults += broken
        for record in found:
            file, kernel = folder / record.place, f"{record.kernel} of {record.op}"
            claim = by_key.get(record.key)
            if claim is None or claim.folder != folder:
                useless.append(file)
                faults.append(
                    f"{file}: no backend {record.backend} in this package offers {kernel}; install what does, or "
                    f"`{_COMMAND} --prune` removes the record"
                )
                continue
            told = Verification(claim, record, counts)
            if told.changed is not None:
                useless.append(file)
                records[file] = (record, STALE)
                faults.append(
                    f"{file} is stale: {told.changed} changed after {kernel} {record.level.word} on {record.chip}; "
                    f"`nox -s evidence` on that device proves it again, `{_COMMAND} --prune` removes the record"
                )
                continue
            records[file] = (record, record.level.word + ", earlier suite" * (not told.of_present_suite))
            if record.backend in untrue:
                continue
            lies = list(told.lies())
            faults += [f"{file} {lie}; prove it again, or `{_COMMAND} --prune` removes the record" for lie in lies]
            if lies:
                useless.append(file)
                continue
            believed.append(record)
            earlier += not told.of_present_suite
            unknown = told.unknown()
            if unknown is not None:
                notes[unknown] = notes.get(unknown, 0) + 1
    sentences = [f"{number} records: {what}" for what, number in notes.items()]
    if earlier:
        sentences.append(
            f"{earlier} records are of an earlier suite: `--kpt-sample` tries their kernels in full, "
            "`nox -s evidence` proves them anew"
        )
    return Verdict(records, tuple(believed), tuple(faults), tuple(sentences), tuple(useless))


def examine(place: Place) -> Verdict:
    """What is wrong with the records, the ratchet and the table, a sentence each that says what mends it."""
    claims = registered()
    try:
        verdict = judge(claims)
        faults = [*verdict.faults, *ratchet_faults(place.ratchet, levels_of(claims, verdict.believed))]
    except EvidenceError as error:
        return Verdict(faults=(str(error),))
    faults += _of_the_table(place, table(claims, verdict.records, place.support.parent))
    return replace(verdict, faults=tuple(faults))


def faults(place: Place) -> list[str]:
    """The faults that `examine` finds."""
    return list(examine(place).faults)


def write(place: Place, *, prune: bool = False, lower: str | None = None) -> tuple[Path, ...]:
    """Write the table anew, and raise the ratchet to what is proven.

    Args:
        place: what is written.
        prune: remove the records that prove nothing, and from the ratchet the kernels that are gone.
        lower: why the ratchet is lowered to what is proven; None never lowers it.

    Returns:
        The records that were removed.

    Raises:
        EvidenceError: a file among the records is none, or the ratchet is none.
    """
    claims = registered()
    broken = [fault for folder in {claim.folder for claim in claims if claim.folder} for fault in load(folder)[1]]
    if broken:
        raise EvidenceError("\n".join(broken))
    verdict = judge(claims)
    gone = verdict.useless if prune else ()
    kept = {file: shown for file, shown in verdict.records.items() if file not in gone}
    levels = levels_of(claims, verdict.believed)
    ratchet = raised(read_ratchet(place.ratchet), levels, prune=prune, lower=lower)
    write_whole(place.support, table(claims, kept, place.support.parent))
    write_ratchet(place.ratchet, ratchet)
    for file in gone:
        file.unlink()
    registry.forget_selections()  # what was read of the records is forgotten with them
    return tuple(sorted(gone))


def take(folder: Path) -> list[Path]:
    """Bring records that were made elsewhere, from installed wheels, into the packages that offer their kernels.

    Args:
        folder: as `--kpt-evidence=FOLDER` leaves it: in it a folder for each package.

    Returns:
        The files that were written.

    Raises:
        EvidenceError: a record is of other files than those here, or of ones that were not committed then.
    """
    by_key = {claim.key: claim for claim in registered()}
    if not folder.is_dir():
        raise EvidenceError(f"there is no folder {folder}; expected one that --kpt-evidence wrote")
    written = []
    for package in sorted(path for path in folder.iterdir() if path.is_dir()):
        records, broken = load(package)
        if broken:
            raise EvidenceError("\n".join(broken))
        for record in records:
            claim = by_key.get(record.key)
            if claim is None or claim.folder is None:
                raise EvidenceError(f"{package / record.place}: nothing offers {'/'.join(record.key)}; install it")
            told = Verification(claim, record)
            if told.changed is not None:
                raise EvidenceError(f"{package / record.place}: {told.changed} is another here; check out what was run")
            history = history_of_sources(claim.sources())
            if record.commit is None and history is not None:
                record = replace(record, commit=history.newest_until(record.when))
                told = Verification(claim, record)
            lies = list(told.lies())
            if lies:
                raise EvidenceError(f"{package / record.place} {lies[0]}")
            written.append(save(claim.folder, record))
    return written


def _untrue_libraries() -> dict[str, str]:
    """The backends whose libraries are not what their builds wrote down, and what they say of it."""
    found = {}
    for name, backend in kpt_core.backends().items():
        try:
            backend.library()
        except KptError as error:
            found[name] = f"nothing is proven of backend {name}: {error}"
    return found


def _of_the_table(place: Place, document: str) -> list[str]:
    mend = f"`{_COMMAND}{place.options}`"
    if not place.support.is_file():
        return [f"{place.support} is not there; {mend} makes it"]
    want, have = _lines(document), _lines(place.support.read_text(encoding="utf-8"))
    more, less = _without(have, want), _without(want, have)
    found = [f"{place.support} says {line}, which no record proves; {mend} mends it" for line in more]
    found += [f"{place.support} lacks {line}, which the records prove; {mend} mends it" for line in less]
    if have != want and not found:
        found.append(f"{place.support} has its lines in another order or twice; {mend} mends it")
    return found


def _lines(document: str) -> list[str]:
    """The lines, each with its heading: two tables may have equal rows."""
    heading, lines = "", []
    for line in document.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        lines.append(f"{line!r} under {heading!r}")
    return lines


def _without(lines: list[str], others: list[str]) -> list[str]:
    known = set(others)
    return [line for line in dict.fromkeys(lines) if line not in known]
