"""One record: what was proven of one kernel on one chip, as a JSON file that is read as strictly as it is written."""

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from kpt_core import KptError

FORMAT = "kpt-evidence-1"


class EvidenceError(KptError):
    """A record, or the source that it is about, can't be read; the message names the file."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was proven of one kernel on one chip.

    Attributes:
        op: name of the op.
        kernel: the kernel's forward function, or `reference`.
        backend: the kernel's backend, or `reference`.
        chip: the device's own name where it ran (`NVIDIA H200`), the target where it was compiled (`sm90`).
        level: how it was proven. `claimed` needs no record and has none.
        source: hash of the files that the kernel is made of, see `sources`.
        versions: of Python, torch, Triton and KPT's packages.
        date: in UTC, as in `2026-11-21T09:30:00Z`.
        commit: that the files are of, with `+changes` if they differ from it; None outside a git work tree.
        checks: how many passed; configurations, where it was compiled.
        expected_failures: checks that failed as the backend's `xfails.txt` says.
        details: what else was measured: registers, spills, shared memory.
    """

    op: str
    kernel: str
    backend: str
    chip: str
    level: Level
    source: str
    versions: Mapping[str, str]
    date: str
    commit: str | None
    checks: int
    expected_failures: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def dumps(self) -> str:
        """The record as JSON."""
        document = {"format": FORMAT, **asdict(self), "level": self.level.word}
        return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    @property
    def place(self) -> Path:
        """Where the record lies in its folder: one file for each kernel and chip."""
        name = "--".join((self.op, slug(self.kernel), slug(self.chip).lower()))
        return Path(slug(self.backend), f"{name}.json")


def slug(text: str) -> str:
    """`text` as part of a file's name."""
    return re.sub(r"[^\w.]+", "-", text, flags=re.ASCII).strip("-")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_date(value: Any) -> bool:
    try:
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ") is not None
    except (TypeError, ValueError):
        return False


#: What each field of a file must be: a sentence for the error, and the test.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": (repr(FORMAT), lambda value: value == FORMAT),
    "op": ("a name like 'moe.experts'", lambda value: _is_text(value) and re.fullmatch(r"\w+\.\w+", value) is not None),
    "kernel": ("a kernel's full name or 'reference'", _is_text),
    "backend": ("a backend's name or 'reference'", _is_text),
    "chip": ("a name", _is_text),
    "level": (
        "'compiled', 'interpreted' or 'ran'",
        lambda value: value in [level.word for level in Level if level is not Level.CLAIMED],
    ),
    "source": (
        "64 hexadecimal digits",
        lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None,
    ),
    "versions": (
        "names with versions",
        lambda value: isinstance(value, dict) and value != {} and all(map(_is_text, value.values())),
    ),
    "date": ("a date like '2026-11-21T09:30:00Z'", _is_date),
    "commit": (
        "a commit, with or without '+changes', or null",
        lambda value: (
            value is None or (isinstance(value, str) and re.fullmatch(r"[0-9a-f]{7,64}(\+changes)?", value) is not None)
        ),
    ),
    "checks": ("a number of 1 or more", lambda value: _is_count(value) and value > 0),
    "expected_failures": ("a number of 0 or more", _is_count),
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
    del document["format"]
    return Record(**document | {"level": Level[document["level"].upper()]})
