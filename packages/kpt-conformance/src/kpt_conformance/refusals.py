"""A failure where a kernel refused all of a check, by the process that knows what all tests came to."""

from collections import Counter
from typing import Any

import pytest

#: Under which name a process that `-n` started sends what it found.
SENT = "kpt_refusals"

#: The check whose trials tell how much of its op a kernel takes.
MEASURE = "values"

Found = dict[str, tuple[int, list[tuple[str, str, dict[str, int]]]]]
"""By kernel: how many trials there are, and of each check and dtype how many ended how."""


class Refusals:
    """A plugin that fails a run in which a kernel refused every trial of a check in a dtype that it claims.

    A kernel of which a part was not run is not judged. Where `-n` shares out the tests, the process that does so judges
    by what the others send it.
    """

    def __init__(self) -> None:
        self.found: Found = {}
        self.sentences: list[str] = []
        self.warnings: list[str] = []

    def add(self, kernel: str, wanted: int, outcomes: list[tuple[str, str, dict[str, int]]]) -> None:
        """Count how some trials of a kernel ended, of as many as are wanted."""
        _, earlier = self.found.get(kernel, (wanted, []))
        self.found[kernel] = wanted, [*earlier, *outcomes]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Take what another process found."""
        for kernel, (wanted, outcomes) in getattr(node, "workeroutput", {}).get(SENT, {}).items():
            self.add(kernel, wanted, outcomes)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge the kernels all of whose trials were run."""
        if self.found:
            self.sentences = self._judged()
        if self.sentences and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _judged(self) -> list[str]:
        from .coverage import absent  # brings torch, which other projects' runs do without

        sentences = []
        for kernel, (wanted, outcomes) in self.found.items():
            places: dict[tuple[str, str], Counter[str]] = {}
            for check, dtype, counts in outcomes:
                places.setdefault((check, dtype), Counter()).update(counts)
            if sum(map(Counter.total, places.values())) < wanted:
                continue
            sentences += [
                f"{kernel} refused every trial of {check} in {dtype}: that proves nothing; take a case of it, or "
                f"leave {dtype} out of the kernel's dtypes"
                for check, dtype in absent(places)
            ]
            counts = sum((found for (check, _), found in places.items() if check == MEASURE), Counter[str]())
            if 2 * counts["refused"] > counts.total():
                self.warnings.append(
                    f"{kernel} refused {counts['refused']} of {counts.total()} trials of {MEASURE}: little of what the "
                    "op documents was tried"
                )
        return sentences

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was refused."""
        if self.warnings:
            terminalreporter.section("refused cases", yellow=True)
            for sentence in self.warnings:
                terminalreporter.write_line(f"WARNING: {sentence}")
        if self.sentences:
            terminalreporter.section("refused checks", red=True)
            for sentence in self.sentences:
                terminalreporter.write_line(f"FAILED: {sentence}")
