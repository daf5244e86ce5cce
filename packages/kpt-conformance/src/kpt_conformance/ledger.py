"""What a run of the suite proved, kernel by kernel, for the records of evidence."""

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .evidence import record_success
from .generation import GENERATED
from .trial import Subject


class Ledger:
    """A plugin that records each kernel all of whose tests were run and none failed.

    Args:
        folder: of the records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[tuple[type, str], str] = {}
        self.written: list[Path] = []
        self.left_out: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note how a test ended."""
        report = yield
        if isinstance(item, pytest.Function) and item.cls is not None and hasattr(item, "callspec"):
            key = item.cls, str(item.callspec.id)
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            if report.when == "call" or outcome != "passed":
                self.outcomes[key] = "failed" if self.outcomes.get(key) == "failed" else outcome
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records."""
        for cls, tests in session.config.stash.get(GENERATED, {}).items():
            by_subject: dict[Subject, Counter[str]] = {}
            for name, subject in ((n, s) for made in tests.values() for n, s in made.items()):
                if subject is not None:
                    outcome = self.outcomes.get((cls, name), "not run")
                    by_subject.setdefault(subject, Counter())[outcome] += 1
            for subject, counts in by_subject.items():
                self._enter(subject, counts)

    def _enter(self, subject: Subject, counts: Counter[str]) -> None:
        if subject.composite:
            return  # no kernel of the backend's own
        missing = [f"{counts[kind]} {kind}" for kind in ("failed", "not run") if counts[kind]]
        if missing or not counts["passed"]:
            self.left_out[str(subject)] = ", ".join(missing) or "none passed"
            return
        self.written.append(
            record_success(
                self.folder,
                op=subject.op.name,
                kernel=subject.target,
                backend=subject.backend,
                device=subject.device,
                checks=counts["passed"],
                expected_failures=counts["xfailed"],
            )
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was recorded, and what was not."""
        terminalreporter.section("evidence")
        for path in self.written:
            terminalreporter.write_line(f"recorded {path}")
        for subject, reason in self.left_out.items():
            terminalreporter.write_line(f"not recorded: {subject} ({reason})")
