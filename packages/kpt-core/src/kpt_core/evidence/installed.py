"""The records that came with the installed packages, and what they still prove of the files that are installed."""

from pathlib import Path

from kpt_core import registry
from kpt_core.contract import Backend, Kernel
from kpt_core.errors import KptError

from .claims import Claim, claim_of_kernel
from .record import EvidenceError, Level, Record, loads

_folders: dict[Path, list[Record]] = {}
_proofs: dict[Claim, tuple[Record, ...]] = {}


def _forget() -> None:
    _folders.clear()
    _proofs.clear()


registry.on_forget(_forget)


def read(folder: Path, place: Path) -> Record:
    """A record of a folder.

    Raises:
        EvidenceError: the file is no record, or that of another kernel or chip.
    """
    file = folder / place
    try:
        record = loads(file.read_text(encoding="utf-8"), file)
    except UnicodeDecodeError:
        raise EvidenceError(f"{file} is no evidence record: it is not UTF-8; remove it") from None
    if record.place != place:
        raise EvidenceError(
            f"{file} holds the record that belongs to {folder / record.place}; move it there, or remove it"
        )
    return record


def load(folder: Path) -> tuple[list[Record], list[str]]:
    """Every record of a package's folder, and a sentence for each file in it that is none.

    A folder that does not exist holds no records. Files whose name begins with a dot are passed by.
    """
    records, faults = [], []
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        try:
            records.append(read(folder, file.relative_to(folder)))
        except EvidenceError as error:
            faults.append(str(error))
    return records, faults


def proofs(claim: Claim) -> tuple[Record, ...]:
    """The records of a kernel whose files, and its op's, are still the ones that it was proven with, best first.

    Raises:
        EvidenceError: the kernel's source is not there.
    """
    if claim not in _proofs:
        folder = claim.folder
        if folder is not None and folder not in _folders:
            _folders[folder] = load(folder)[0]
        found = [record for record in _folders.get(folder, ()) if record.key == claim.key] if folder else []
        if found:
            hashes = {"kernel": claim.sources().hash, "contract": claim.contract().hash}
            found = [record for record in found if hashes.items() <= record.hashes.items()]
        _proofs[claim] = tuple(sorted(found, key=lambda record: (-record.level, record.chip)))
    return _proofs[claim]


def why_unproven(backend: Backend, kernel: Kernel, least: Level) -> str | None:
    """Why a kernel lacks the evidence that is asked for, or None.

    Args:
        backend: that offers it.
        kernel: the kernel.
        least: the level that is asked for, on whatever chip.
    """
    try:
        backend.library()
        found = proofs(claim_of_kernel(backend, kernel))
    except KptError as error:
        return f"its evidence can't be believed: {error}"
    level = found[0].level if found else Level.CLAIMED
    if level >= least:
        return None
    return (
        f"evidence is {level.word}; KPT_REQUIRE_EVIDENCE asks for {least.word}: run `nox -s evidence` in its checkout "
        "on a machine that has the device, or ask for less"
    )
