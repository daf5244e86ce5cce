"""The folder of records: one file for each kernel and chip."""

from pathlib import Path

from kpt_core.files import write_whole

from .record import EvidenceError, Record, loads


def load(folder: Path) -> tuple[list[Record], list[str]]:
    """Every record of a folder, and a sentence for each file in it that is none.

    A folder that does not exist holds no records. Files whose name begins with a dot are passed by.
    """
    records, faults = [], []
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        try:
            records.append(_read(folder, file.relative_to(folder)))
        except EvidenceError as error:
            faults.append(str(error))
    return records, faults


def _read(folder: Path, place: Path) -> Record:
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


def save(folder: Path, record: Record) -> Path:
    """Write a record, unless a higher level of the same source is there.

    Returns:
        The file, whichever record it holds.

    Raises:
        EvidenceError: a file that is no record is in its place.
    """
    file = folder / record.place
    if file.exists():
        before = _read(folder, record.place)
        if before.source == record.source and before.level > record.level:
            return file
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, record.dumps())
    return file
