"""What a run is to do, as the command gives it to its workers; this module needs Python alone."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

#: In the order in which they run.
PARTS = ("smoke", "conformance", "bench", "tune")
#: What a worker ends with when its device no longer answers: the next worker goes on with what is left.
DEVICE_LOST = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a worker is told.

    Attributes:
        part: one of `PARTS`.
        out: folder of the reports; the part's own is below it.
        device: `cuda`, or `cpu` to try this program without a GPU.
        tiny: sizes so small that Triton's interpreter computes them in seconds.
        jobs: processes at a time where the work can be shared.
        commit: of the source, "" if unknown.
        deadline: seconds since the epoch at which the part ends.
        checkout: the repository, where tests are taken from; they are left out where it has none.
    """

    part: str
    out: Path
    device: str
    tiny: bool
    jobs: int
    commit: str
    deadline: float
    checkout: Path

    @property
    def folder(self) -> Path:
        """The part's own folder."""
        return self.out / self.part

    def tests(self, path: str) -> Path | None:
        """A file or folder of tests in the checkout, or None."""
        found = self.checkout / path
        return found if found.exists() else None


def say(text: str) -> None:
    """Show a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that a reader never meets a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
