"""Expected failures: a file of test ids beside a backend's tests, in which nothing may go stale."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from .generation import GENERATED, MAKERS
from .suite import Suite

NAME = "xfails.txt"


@dataclass(frozen=True, slots=True)
class Expected:
    """A line of the file: `values-moe.grouped_mm-pkg.mod:kernel-small-bfloat16  # reason`; `*` stands for anything."""

    place: str
    pattern: str
    reason: str

    def matches(self, test: str) -> bool:
        """Whether the line is for the test of that id."""
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), test) is not None


def read(path: Path) -> list[Expected]:
    """The lines of a file of expected failures.

    Raises:
        pytest.UsageError: a line has no reason.
    """
    expected = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        pattern, _, reason = map(str.strip, line.partition("#"))
        if pattern and not reason:
            raise pytest.UsageError(f"{path}:{number}: {pattern!r} has no reason; write `{pattern}  # why`")
        if pattern:
            expected.append(Expected(f"{path}:{number}", pattern, reason))
    return expected


def expect_failures(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that are expected to fail, strictly: one that passes fails.

    Raises:
        pytest.UsageError: a line is for no test.
    """
    for cls, generated in config.stash.get(GENERATED, {}).items():
        path = _file_of(config, cls)
        if path is None:
            continue
        expected = read(path)
        if generated.keys() == MAKERS.keys():  # else only some tests were asked for
            ids = {name for made in generated.values() for name in made}
            for line in expected:
                if not any(map(line.matches, ids)):
                    raise pytest.UsageError(f"{line.place}: {line.pattern!r} is the id of no test; delete the line")
        for item in items:
            if isinstance(item, pytest.Function) and item.cls is cls and hasattr(item, "callspec"):
                for line in expected:
                    if line.matches(item.callspec.id):
                        item.add_marker(pytest.mark.xfail(reason=line.reason, strict=True))


def _file_of(config: pytest.Config, cls: type[Suite]) -> Path | None:
    """The file that is named on the command line, or that lies beside the class's own."""
    asked: Path | None = config.getoption("--kpt-xfails")
    if asked is not None:
        if not asked.is_file():
            raise pytest.UsageError(f"--kpt-xfails={asked}: there is no such file")
        return asked
    beside = Path(inspect.getfile(cls)).with_name(NAME)
    return beside if beside.is_file() else None
