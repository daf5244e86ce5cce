"""The rows of a part's report: written as each is known, so that what ends a worker takes none of them along."""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .plan import DEVICE_LOST, say, write_whole

Row = dict[str, Any]
Job = tuple[str, Callable[[], Row]]


class LeftOutError(Exception):
    """A row can't be had here; the message is the reason."""


class Rows:
    """The rows in a folder.

    Args:
        folder: made if it is not there; rows that are in it already count as done.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.jsonl"
        self._begun = folder / "begun.json"
        self._lock = threading.Lock()
        self.rows: list[Row] = read_lines(self.path)

    def known(self, name: str) -> bool:
        """Whether a row is there."""
        return any(row["name"] == name for row in self.rows)

    def begin(self, name: str) -> None:
        """Say what is under way: if the process dies, this is what it died of."""
        with self._lock:
            write_whole(self._begun, json.dumps({"name": name, "at": time.time()}))

    @property
    def under_way(self) -> str | None:
        """What was begun and has no row."""
        try:
            name = str(json.loads(self._begun.read_text())["name"])
        except (FileNotFoundError, ValueError):
            return None
        return None if self.known(name) else name

    def add(self, name: str, status: str, **found: Any) -> None:
        """Write a row; status is `ok`, `failed`, `left out` or `lost`."""
        with self._lock:
            self.rows.append({"name": name, "status": status, **found})
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        why = next((str(found[key]).splitlines()[0] for key in ("error", "reason") if found.get(key)), "")
        say(f"{status:9} {name}{f': {why}' if why else ''}")

    def run(self, jobs: Iterable[Job], alive: Callable[[], bool]) -> None:
        """Run what has no row yet; what one raises hides no other.

        Args:
            jobs: name of a row, and what finds it.
            alive: whether the device still answers; asked after a failure. If not, the process ends.
        """
        for name, find in jobs:
            if self.known(name):
                continue
            self.begin(name)
            start = time.perf_counter()
            try:
                found = find()
            except LeftOutError as reason:
                self.add(name, "left out", reason=str(reason))
                continue
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self.add(name, "failed", error=text, traceback=traceback.format_exc())
                if not alive():
                    sys.exit(DEVICE_LOST)
                continue
            self.add(name, found.pop("status", "ok"), **found, took=round(time.perf_counter() - start, 3))


def read_lines(path: Path) -> list[Row]:
    """The whole lines of a file of JSON lines; nothing where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a process that was stopped
            continue
    return rows
