"""Whether a support table says what the records prove, and the records are about what is there."""

from pathlib import Path

from kpt_core.files import write_whole

from .claims import Claim, registered
from .record import EvidenceError, Record
from .store import load
from .support import is_stale, summary, table

_COMMAND = "python -m kpt_conformance.evidence write"
EVIDENCE = Path("evidence")
SUPPORT = Path("docs/support.md")


def faults(folder: Path, support: Path) -> list[str]:
    """What is wrong with a folder of records and the table made from it, a sentence each that says what mends it.

    Args:
        folder: of the records.
        support: the table.
    """
    records, found = load(folder)
    claims = registered()
    mend = f"`{_COMMAND}{_options(folder, support)}`"
    try:
        found += outdated(folder, claims, records).values()
        want = _lines(table(claims, records))
    except EvidenceError as error:
        return [*found, str(error)]
    if not support.is_file():
        return [*found, f"{support} is not there; {mend} makes it"]
    have = _lines(support.read_text(encoding="utf-8"))
    found += [f"{support} says {line}, which no record proves; {mend} mends it" for line in _without(have, want)]
    found += [f"{support} lacks {line}, which the records prove; {mend} mends it" for line in _without(want, have)]
    if have != want and not found:
        found.append(f"{support} has its lines in another order or twice; {mend} mends it")
    return found


def outdated(folder: Path, claims: list[Claim], records: list[Record]) -> dict[Path, str]:
    """The files of the records that prove nothing any more, each with the reason and what mends it."""
    by_key = {claim.key: claim for claim in claims}
    found = {}
    for record in records:
        file, kernel = folder / record.place, f"{record.kernel} of {record.op}"
        prune = f"`{_COMMAND} --prune{_options(folder)}` removes the record"
        claim = by_key.get((record.backend, record.op, record.kernel))
        if claim is None:
            found[file] = f"{file}: no backend {record.backend} offers {kernel}; install its package, or {prune}"
        elif is_stale(claim, record):
            found[file] = (
                f"{file} is stale: {kernel} changed after it {summary(record)}; "
                f"`nox -s evidence` on that device proves it again, {prune}"
            )
    return found


def write(folder: Path, support: Path, *, prune: bool) -> list[Path]:
    """Write the table anew.

    Args:
        folder: of the records.
        support: the table.
        prune: remove the records that prove nothing any more.

    Returns:
        The records that were removed.

    Raises:
        EvidenceError: a file of the folder is no record.
    """
    records, broken = load(folder)
    if broken:
        raise EvidenceError("\n".join(broken))
    claims = registered()
    gone = set(outdated(folder, claims, records)) if prune else set()
    write_whole(support, table(claims, [record for record in records if folder / record.place not in gone]))
    for file in gone:
        file.unlink()
    return sorted(gone)


def _lines(document: str) -> list[str]:
    """The lines, each with its heading: two ops may have equal rows."""
    heading, lines = "", []
    for line in document.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        lines.append(f"{line!r} under {heading!r}")
    return lines


def _without(lines: list[str], others: list[str]) -> list[str]:
    known = set(others)
    return [line for line in dict.fromkeys(lines) if line not in known]


def _options(folder: Path, support: Path = SUPPORT) -> str:
    """The options that name another folder or table than the usual one."""
    options = (("evidence", folder, EVIDENCE), ("support", support, SUPPORT))
    return "".join(f" --{name} {path}" for name, path, usual in options if path != usual)
