"""Tuning tables as files: read strictly, merged under a lock, written whole."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kpt_core.errors import InputError
from kpt_core.files import write_whole
from kpt_core.policy import Key

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningEntry:
    """What was fastest for the calls of an op that share a dtype and a key.

    Attributes:
        op: name of the op.
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
        distribution: the package that the winner comes from, None if the process added it itself.
        version: of that package.
        torch: version of torch.
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
        """Which calls it is for."""
        return self.op, self.dtype, self.key


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def is_key(value: Any) -> bool:
    """Whether a value can be a size key: a sequence of ints and strings."""
    return isinstance(value, list | tuple) and all(type(part) in (int, str) for part in value)


def is_config(value: Any) -> bool:
    """Whether a value can be a configuration: a dictionary that JSON gives back as it was."""
    try:
        return isinstance(value, dict) and bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("op", "dtype", "kernel", "default", "case", "torch", "date"), (_is_text, "a text")),
    **dict.fromkeys(("seconds", "gain", "noise"), (_is_number, "a finite number, not negative")),
    **dict.fromkeys(("distribution", "version"), (lambda value: value is None or _is_text(value), "a text or null")),
    "key": (is_key, "a list of ints and texts"),
    "present": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
    "config": (lambda value: value is None or is_config(value), "an object or null"),
}


def _entry(raw: Any) -> TuningEntry:
    """Make an entry of its JSON form; `ValueError` with a clause that says what is wrong."""
    if isinstance(raw, dict):
        raw = {name: value for name, value in raw.items() if name != "method"}  # older files say "measured"
    if not isinstance(raw, dict) or raw.keys() != _FIELDS.keys():
        names = sorted(_FIELDS.keys() ^ raw.keys()) if isinstance(raw, dict) else []
        raise ValueError(f"an entry lacks or adds {', '.join(names)}" if names else f"an entry is {raw!r:.60}")
    for name, (holds, expected) in _FIELDS.items():
        if not holds(raw[name]):
            raise ValueError(f"an entry's {name} is {raw[name]!r:.60}, not {expected}")
    return TuningEntry(**{**raw, "key": tuple(raw["key"]), "present": tuple(raw["present"])})


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def load_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: it is no JSON; the message is a clause without the file's name.
        OSError: it can't be read.
    """
    try:
        return json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not whole JSON ({error})") from error


def read_table(path: Path, device: str) -> tuple[list[TuningEntry], list[str]]:
    """The entries of a table, and a clause for each one that is malformed.

    Args:
        path: of the file.
        device: name of the device that it must be for.

    Raises:
        InputError: nothing of the file can be used; the message is a clause without the file's name.
        OSError: it can't be read.
    """
    data = load_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"it is no tuning table of format {FORMAT} (found {found!r:.60})")
    if data.get("device") != device:
        raise InputError(f"it is for {data.get('device')!r:.60}, not for {device!r}")
    entries: dict[tuple[str, str, Key], TuningEntry] = {}
    malformed = []
    for raw in data["entries"]:
        try:
            entry = _entry(raw)
        except ValueError as error:
            malformed.append(str(error))
        else:
            entries[entry.calls] = entry
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

    Raises:
        OSError: the file or its folder can't be written.
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
        document = {
            "format": FORMAT,
            "device": device,
            "written": today(),
            "versions": {"torch": str(torch.__version__)},
            "entries": [asdict(entry) for _, entry in sorted(merged.items(), key=lambda item: str(item[0]))],
        }
        write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return aside


def today() -> str:
    """The time in UTC, to the second."""
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
