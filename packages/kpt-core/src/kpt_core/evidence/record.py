"""One record: what was proven of one kernel on one chip, as a JSON file that is read as strictly as it is written."""

import enum
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kpt_core.errors import KptError

FORMAT = "kpt-evidence-3"
#: What a record is hashed over, see `Record`.
HASHES = ("kernel", "contract", "suite", "library")
_DATE = "%Y-%m-%dT%H:%M:%SZ"


class EvidenceError(KptError):
    """A record, or the source that it is about, can't be read or believed; the message names the file."""


class Level(enum.IntEnum):
    """The rungs of the ladder; the higher one proves more."""

    CLAIMED = 0
    COMPILED = 1
    INTERPRETED = 2
    RAN = 3

    @property
    def word(self) -> str:
        """As it is written in records and tables."""
        return self.name.lower()


#: What a record, and `KPT_REQUIRE_EVIDENCE`, may name.
PROVEN = tuple(level.word for level in Level if level is not Level.CLAIMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was proven of one kernel on one chip.

    `passed + refused + skipped` is every check that the suite has for the kernel, and none failed. Of a compiled kernel
    it is every configuration that it offers for the chip, where what the chip can't have counts as refused.

    Attributes:
        op: name of the op.
        kernel: the kernel's forward function, or `reference`.
        backend: the kernel's backend, or `reference`.
        chip: the device's own name where it ran (`NVIDIA H200`), the target where it was compiled (`sm90`).
        device: torch's type of the device where it ran, `cuda`; that of the chip where it was compiled.
        level: how it was proven. `claimed` needs no record and has none.
        hashes: of the files that the kernel is made of (`kernel`), of the op and its cases (`contract`), of the checks
            (`suite`), and of `ran_with` (`library`).
        ran_with: what ran beside Python: instruction set, sources and compiler of a native library; Triton's version
            and tiles; torch's version.
        versions: of Python, torch, Triton and KPT's packages.
        date: in UTC, as in `2026-11-21T09:30:00Z`.
        commit: that the files are of; None where they lay in no git work tree.
        passed: how many checks passed; configurations, where it was compiled.
        refused: checks that the kernel refused.
        skipped: checks that had nothing to try.
        outcomes: p, r or s (passed, refused, skipped) for each check, in the order of the checks' names, so that who
            runs some of them again can compare. A compiled kernel has none.
        absent: what no check passed for, each with `check`, `dtypes`, how many were `refused` and `skipped`, and
            the `reason` of one.
        details: what else was measured: registers, spills, shared memory.
    """

    op: str
    kernel: str
    backend: str
    chip: str
    device: str
    level: Level
    hashes: Mapping[str, str]
    ran_with: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    commit: str | None
    passed: int
    refused: int = 0
    skipped: int = 0
    outcomes: str = ""
    absent: tuple[Mapping[str, Any], ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def dumps(self) -> str:
        """The record as JSON."""
        document = {"format": FORMAT, **asdict(self), "level": self.level.word}
        return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    @property
    def place(self) -> Path:
        """Name of the record's file: one for each kernel and chip."""
        return Path("--".join((self.op, slug(self.kernel), slug(self.chip).lower())) + ".json")

    @property
    def key(self) -> tuple[str, str, str]:
        """The kernel that it is about: backend, op and function."""
        return (self.backend, self.op, self.kernel)

    @property
    def total(self) -> int:
        """All checks, whatever became of them."""
        return self.passed + self.refused + self.skipped

    @property
    def when(self) -> datetime:
        """The date."""
        return datetime.strptime(self.date, _DATE).replace(tzinfo=UTC)


def now() -> str:
    """The present date as records have it."""
    return datetime.now(UTC).strftime(_DATE)


def hash_of(parts: Mapping[str, str]) -> str:
    """SHA-256 of names and values."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def slug(text: str) -> str:
    """`text` as part of a file's name."""
    return re.sub(r"[^\w.]+", "-", text, flags=re.ASCII).strip("-")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_date(value: Any) -> bool:
    try:
        return datetime.strptime(value, _DATE) is not None
    except (TypeError, ValueError):
        return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and value != {} and all(map(_is_text, value.values()))


def _are_hashes(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(HASHES)
        and all(isinstance(each, str) and re.fullmatch(r"[0-9a-f]{64}", each) for each in value.values())
    )


def _is_commit(value: Any) -> bool:
    return value is None or (isinstance(value, str) and re.fullmatch(r"[0-9a-f]{7,64}", value) is not None)


def _are_absent(value: Any) -> bool:
    names = {"check", "dtypes", "refused", "skipped", "reason"}
    return isinstance(value, list) and all(isinstance(each, dict) and set(each) == names for each in value)


#: What each field of a file must be: a sentence for the error, and the test.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": (repr(FORMAT), lambda value: value == FORMAT),
    "op": ("a name like 'moe.experts'", lambda value: _is_text(value) and re.fullmatch(r"\w+\.\w+", value) is not None),
    "kernel": ("a kernel's full name or 'reference'", _is_text),
    "backend": ("a backend's name or 'reference'", _is_text),
    "chip": ("a name", _is_text),
    "device": ("a type of device like 'cuda'", _is_text),
    "level": (f"one of {', '.join(PROVEN)}", lambda value: value in PROVEN),
    "hashes": (f"64 hexadecimal digits for each of {', '.join(HASHES)}", _are_hashes),
    "ran_with": ("names with values", _are_texts),
    "versions": ("names with versions", _are_texts),
    "date": ("a date like '2026-11-21T09:30:00Z'", _is_date),
    "commit": ("a commit, or null", _is_commit),
    "passed": ("a number of 1 or more", lambda value: _is_count(value) and value > 0),
    "refused": ("a number of 0 or more", _is_count),
    "skipped": ("a number of 0 or more", _is_count),
    "outcomes": ("letters p, r and s", lambda value: isinstance(value, str) and set(value) <= set("prs")),
    "absent": ("a list of objects with check, dtypes, refused, skipped and reason", _are_absent),
    "details": ("an object", lambda value: isinstance(value, dict)),
}
assert set(_EXPECTED) == {"format", *(each.name for each in fields(Record))}


def loads(text: str, file: Path | str) -> Record:
    """Read a record.

    Args:
        text: of the file.
        file: whose name the error gives.

    Raises:
        EvidenceError: it is no record, or a value in it is none that a record may have.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{file} is not JSON ({error}); remove it, or take it from the repository again") from None
    if not isinstance(document, dict):
        raise EvidenceError(f"{file} is no evidence record: expected an object, got {type(document).__name__}")
    strange, absent = sorted(set(document) - set(_EXPECTED)), sorted(set(_EXPECTED) - set(document))
    if strange or absent:
        what = [f"lacks {', '.join(absent)}"] * bool(absent) + [f"also has {', '.join(strange)}"] * bool(strange)
        raise EvidenceError(f"{file} is no evidence record: it {' and '.join(what)}; remove it")
    for name, (expected, fits) in _EXPECTED.items():
        if not fits(document[name]):
            raise EvidenceError(f"{file}: {name} is {document[name]!r}; expected {expected}")
    if hash_of(document["ran_with"]) != document["hashes"]["library"]:
        raise EvidenceError(f"{file}: the hash of library is not that of ran_with; remove the record")
    counts = [document[name] for name in ("passed", "refused", "skipped")]
    if document["level"] != Level.COMPILED.word and counts != list(map(document["outcomes"].count, "prs")):
        raise EvidenceError(f"{file}: outcomes has other numbers of p, r and s than {counts}; remove the record")
    del document["format"]
    return Record(**document | {"level": Level[document["level"].upper()], "absent": tuple(document["absent"])})
