"""Read a model's program, a `.pt2` file, and refuse whatever `torch.export.load` might run code of."""

import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath

from kpt_serve.errors import PackageError

from .program import check_program

#: Bytes of a file; a program of 32 layers has less than one MiB.
LARGEST = 64 << 20
#: What a file ends with: the end of its directory (64 bit), that end's address, the end (32 bit).
_END64, _ADDRESS, _END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")
_ENDS = _END64.size + _ADDRESS.size + _END.size
_AGAIN = "export the model again, with its weights as arguments and without sample inputs"
_MODEL = "models/model.json"


def _is(wanted: bytes) -> Callable[[bytes], bool]:
    return lambda content: content == wanted


def _is_empty_list(content: bytes) -> bool:
    return content.translate(None, b" \n") == b'{"config":{}}'


#: The entries of a program that KPT writes, below the folder that is named for the file: what each must be.
_ENTRIES: dict[str, tuple[Callable[[bytes], bool], str]] = {
    "archive_format": (_is(b"pt2"), "'pt2'"),
    "archive_version": (_is(b"0"), "'0', which torch 2.13 writes"),
    "byteorder": (_is(b"little"), "'little'"),
    ".data/version": (bytes.isascii, "the version of the archive"),
    ".data/serialization_id": (bytes.isdigit, "a number"),
    "data/weights/model_weights_config.json": (_is_empty_list, "an empty list: torch.export.load may unpickle weights"),
    "data/constants/model_constants_config.json": (
        _is_empty_list,
        "an empty list: torch.export.load may unpickle them",
    ),
    "data/sample_inputs/model.pt": (_is(b""), "empty: torch.export.load unpickles sample inputs"),
    _MODEL: (bool, "the program"),
}


def scan(path: str | os.PathLike[str]) -> None:
    """Raise unless a `.pt2` file is a program as KPT writes them, which `torch.export.load` runs no code of.

    Raises:
        PackageError: It names the file and the entry.
    """
    read_program(path)


def read_program(path: str | os.PathLike[str]) -> bytes:
    """Return a `.pt2` file's content once it was scanned: load these bytes, because the file may have changed since."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PackageError(f"{name} is no file; expected a program (.pt2)")
            if status.st_size > LARGEST:
                raise PackageError(f"{name} has {status.st_size} bytes; a program has at most {LARGEST}: {_AGAIN}")
            content = file.read(LARGEST)
    except OSError as error:
        raise PackageError(f"{name} can't be read: {error.strerror or error}") from error
    _check_end(name, content)
    try:
        entries = _read_entries(name, content)
    # What the library raises for damaged archives; it documents the first alone.
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        EOFError,
        ValueError,
        OverflowError,
        struct.error,
        zlib.error,
    ) as error:
        if isinstance(error, PackageError):
            raise
        raise PackageError(f"{name} is damaged or no program (.pt2): {error}; copy or export it again") from error
    for entry, (holds, wanted) in _ENTRIES.items():
        if not holds(entries[entry]):
            found = repr(entries[entry][:40])[1:]
            raise PackageError(f"{name}: entry {entry!r} is {found}; expected {wanted}; {_AGAIN}")
    check_program(entries[_MODEL], f"{name}: entry {_MODEL!r}")
    return content


def _check_end(name: str, content: bytes) -> None:
    """Raise unless every reader of archives finds the same directory, which ends where the file ends."""
    place = len(content) - _ENDS
    if place < 0 or content[-_END.size :][:4] != b"PK\5\6":
        raise PackageError(f"{name} is truncated or no program (.pt2); copy or export it again")
    end64 = _END64.unpack_from(content, place)
    address = _ADDRESS.unpack_from(content, place + _END64.size)
    end = _END.unpack_from(content, place + _END64.size + _ADDRESS.size)
    count, size, start = end64[-3:]
    if (
        end64[:2] != (b"PK\6\6", _END64.size - 12)
        or end64[4:7] != (0, 0, count)
        or address != (b"PK\6\7", 0, place, 1)
        or end[1:] != (0, 0, count, count, size, start, 0)
        or start + size != place
    ):
        raise PackageError(f"{name} does not end as torch 2.13 ends a program (.pt2): {_AGAIN}")


def _read_entries(name: str, content: bytes) -> dict[str, bytes]:
    """Return the content of each entry, by its name below the archive's folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found: dict[str, bytes] = {}
        folder, seen = None, set[str]()
        for info in archive.infolist():
            place = f"{name}: entry {info.filename!r}"
            path = PurePosixPath(info.filename)
            if info.filename != info.orig_filename or "\\" in info.filename or not info.filename.isprintable():
                raise PackageError(f"{place} has no plain name: {_AGAIN}")
            if path.is_absolute() or ".." in path.parts or str(path) != info.filename:
                raise PackageError(f"{place} leads out of the archive, or is a folder: {_AGAIN}")
            # torch looks names up without regard to case.
            if info.filename.casefold() in seen:
                raise PackageError(f"{place} is there twice, and readers may take either: {_AGAIN}")
            seen.add(info.filename.casefold())
            if info.flag_bits & 1:
                raise PackageError(f"{place} is encrypted: {_AGAIN}")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise PackageError(f"{place} is compressed; torch stores entries as they are: {_AGAIN}")
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
                raise PackageError(f"{place} is a link or a device; expected a file: {_AGAIN}")
            folder = folder or path.parts[0]
            below = str(path.relative_to(path.parts[0]))
            if path.parts[0] != folder or below not in _ENTRIES:
                known = "a program holds its graph alone, no weights, constants, objects or compiled code"
                raise PackageError(f"{place} is none that KPT writes: {known}; {_AGAIN}")
            found[below] = archive.read(info)
    if missing := sorted(_ENTRIES.keys() - found.keys()):
        raise PackageError(f"{name} has no entry {missing[0]!r}: it is no program (.pt2) of torch 2.13; {_AGAIN}")
    return found
