"""The rows of a part's report: each is on disk as soon as it is known, so that what ends a process takes none along."""

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Find = tuple[str, Callable[[], Row]]
#: So long may one row take, in seconds.
PATIENCE = 240.0


class LeftOutError(Exception):
    """A row can't be had here; the message is the reason."""


def run_rows(file: Path, jobs: Iterable[Find], alive: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Run what was not begun yet; what one raises hides no other.

    The process ends where the device is lost, or a row hangs: another one then goes on with the next row.

    Args:
        file: of JSON lines: a row's name when it begins, and the row when it is known.
        jobs: name of a row, and what finds it.
        alive: whether the device still answers; asked after a failure.
        patience: seconds that a row may take.
    """
    begun = {row["name"] for row in read_rows(file)}
    for name, find in jobs:
        if name in begun:
            continue
        _append(file, name=name, status="begun")
        start = time.perf_counter()
        faulthandler.dump_traceback_later(patience, exit=True)
        try:
            found = {"status": "ok", **find(), "took": round(time.perf_counter() - start, 3)}
        except LeftOutError as reason:
            found = {"status": "left out", "error": str(reason)}
        except Exception as error:
            found = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        _append(file, name=name, **found)
        say(f"{found['status']:9} {name} {first_line(found)}")
        if found["status"] == "failed" and not alive():
            sys.exit("the device no longer answers")


def _append(file: Path, **row: Any) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, default=str) + "\n")


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file, of each the last that was said; `lost` is what was begun and has no more."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    lost = {"status": "lost", "error": "it crashed, hung or was out of time; the log says more"}
    return [row | lost if row["status"] == "begun" else row for row in rows.values()]


def first_line(row: Row) -> str:
    """Return the beginning of what went wrong, or was left out."""
    return next(iter(str(row.get("error", "")).splitlines()), "")


def say(text: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
