"""Tuning tables as files: read strictly, merged under a lock, written whole."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any, TypeVar

import torch

from kpt_core import registry
from kpt_core.contract import identity
from kpt_core.errors import InputError
from kpt_core.files import write_whole
from kpt_core.policy import Key
from kpt_core.registry import get_op, kernels
from kpt_core.selection import REFERENCE

FORMAT = 1

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningEntry:
    """What was fastest for the calls of an op that share a dtype and a key.

    Attributes:
        dtype: of the first tensor, as in `bfloat16`.
        key: what the op's `size_key` gives, and `gradient` at its end for calls that need one.
        kernel: identity of the winner (backend/op/function), or `reference`.
        config: the winner's configuration, None for its own default.
        seconds: median time of a call.
        default: what runs without tuning.
        present: the kernels of the op that were there, best first; one that was not, and would run without tuning, may
            be faster than the winner.
        gain: how many times faster than that, 1 if the default stays.
        noise: standard error of the gain.
        case: name of the case that was timed.
        distribution: the package that the winner comes from, of that version; None if the process added it itself.
        date: of the measurement, in UTC.
    """

    op: str
    dtype: str
    key: Key
    kernel: str
    config: dict[str, Any] | None
    seconds: float
    default: str
    present: tuple[str, ...]
    gain: float
    noise: float
    case: str
    distribution: str | None
    version: str | None
    torch: str
    date: str

    @property
    def calls(self) -> tuple[str, str, Key]:
        """The calls that it is for."""
        return self.op, self.dtype, self.key


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def is_key(value: Any) -> bool:
    """Return whether a value can be a size key: a sequence of ints and strings."""
    return isinstance(value, list | tuple) and all(type(part) in (int, str) for part in value)


def is_config(value: Any) -> bool:
    """Return whether a value can be a configuration: a dictionary that JSON gives back as it was."""
    try:
        return isinstance(value, dict) and bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


#: What holds for the JSON form of a field of each type, and the words for it.
_CHECKS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (_is_text, "a text"),
    str | None: (lambda value: value is None or _is_text(value), "a text or null"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    float: (_is_number, "a finite number, not negative"),
    Key: (is_key, "a list of ints and texts"),
    tuple[str, ...]: (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
    dict[str, Any] | None: (lambda value: value is None or is_config(value), "an object or null"),
}


def parse_entry(kind: type[Entry], raw: Any) -> Entry:
    """Make an entry, a dataclass, of its JSON form.

    Raises:
        InputError: with a clause that says what is wrong.
    """
    if not isinstance(raw, dict):
        raise InputError(f"an entry is {raw!r:.60}")
    raw = {name: value for name, value in raw.items() if name != "method"}  # older tables say "measured"
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]  # any dataclass
    if names := sorted(types.keys() ^ raw.keys()):
        raise InputError(f"an entry lacks or adds {', '.join(names)}")
    for name, value in raw.items():
        holds, expected = _CHECKS[types[name]]
        if not holds(value):
            raise InputError(f"an entry's {name} is {value!r:.60}, not {expected}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()})


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def load_document(path: Path) -> dict[str, Any]:
    """Read a JSON file of our format, with a list of entries.

    Raises:
        InputError: it is none; the message is a clause without the file's name.
        OSError: it can't be read.
    """
    try:
        data = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not whole JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"expected format {FORMAT}, found {found!r:.60}")
    if not isinstance(data.get("entries"), list):
        raise InputError(f"its entries are {data.get('entries')!r:.60}, not a list")
    return data


def write_document(path: str | os.PathLike[str], entries: Iterable[Any], **header: Any) -> None:
    """Write dataclasses as a JSON file of our format, whole or not at all."""
    document = {"format": FORMAT, **header, "entries": [asdict(entry) for entry in entries]}
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_table(path: Path, device: str) -> tuple[list[TuningEntry], list[str]]:
    """Read the entries of a table, and a clause for each one that is malformed.

    Args:
        path: of the file.
        device: name of the device that it must be for.

    Raises:
        InputError: nothing of the file can be used; the message is a clause without the file's name.
        OSError: it can't be read.
    """
    data = load_document(path)
    if data.get("device") != device:
        raise InputError(f"it is for {data.get('device')!r:.60}, not for {device!r}")
    entries: dict[tuple[str, str, Key], TuningEntry] = {}
    malformed = []
    for raw in data["entries"]:
        try:
            entry = parse_entry(TuningEntry, raw)
            entries[entry.calls] = entry
        except InputError as error:
            malformed.append(str(error))
    return list(entries.values()), malformed


def merge_into(path: Path, device: str, entries: Iterable[TuningEntry]) -> Path | None:
    """Enter what was measured into a table, which is made if it is not there; other entries stay.

    Processes may do so at the same time: each one's entries survive.

    Args:
        path: of the file; its folder is made.
        device: name of the device that was measured.
        entries: replace those for the same calls.

    Returns:
        Where the old file was kept, if it could not be used as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        kept: list[TuningEntry] = []
        aside = None
        if path.exists():
            try:
                kept, malformed = read_table(path, device)
            except InputError as error:
                malformed = [str(error)]
            if malformed:
                aside = _free_name(path)
                path.replace(aside)
        merged = {entry.calls: entry for entry in (*kept, *entries)}
        ordered = [entry for _, entry in sorted(merged.items(), key=lambda item: str(item[0]))]
        versions = {"torch": str(torch.__version__)}
        write_document(path, ordered, device=device, written=today(), versions=versions)
    return aside


def today() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.corrupt{number}") for number in ("", *range(2, 10_000)))
    return next(name for name in names if not name.exists())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file against other processes that change it."""
    try:
        import fcntl
    except ImportError:  # no POSIX: the file is still whole, but of two changes at once one is lost
        yield
        return
    # A file of its own, never removed: the table itself is replaced, and a lock on the old one would not be seen.
    handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def packages_of(op: str) -> dict[str, tuple[str | None, str | None]]:
    """Return distribution and version of the code of each kernel of an op, by identity; of the reference as well.

    Both are None for what no installed distribution has.
    """
    code = {REFERENCE: get_op(op).defined_in}
    code |= {identity(backend.name, kernel): kernel.forward for backend, kernel in kernels(op)}
    return {name: _distribution_of(target.partition(":")[0].partition(".")[0]) for name, target in code.items()}


@cache
def _distribution_of(package: str) -> tuple[str | None, str | None]:
    # By the package's own name first: to ask which distribution has which package reads the files of all.
    with suppress(PackageNotFoundError):
        found = distribution(package)
        return found.name, found.version
    for name in packages_distributions().get(package, ()):
        return name, distribution(name).version
    return None, None


registry.on_refresh(_distribution_of.cache_clear)
