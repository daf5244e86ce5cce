"""What a run exercised, kernel by kernel: `--kpt-coverage`, and a failure where a kernel refused all of a check."""

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .coverage import Coverage, absent, nothing_of
from .generation import GENERATED
from .suite import CHECKS
from .trial import Subject, Trial

Outcomes = dict[tuple[str, str], Counter[str]]


class Exercised:
    """A plugin that counts what passed, and fails a run in which a kernel refused every trial of a check in a dtype.

    A kernel of which a part was not run is not judged.

    Args:
        path: where to write the counts; None for nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.outcomes: dict[Subject, Outcomes] = {}
        self.ended: Counter[Subject] = Counter()
        self.coverage: dict[Subject, Coverage] = {}
        self.refused: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note how a trial ended."""
        report = yield
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        trial, check = parameters.get("trial"), parameters.get("check")
        if isinstance(trial, Trial) and check is not None and (report.when == "call" or not report.passed):
            self._note(trial, check.__name__, _outcome(report))
        return report

    def _note(self, trial: Trial, check: str, outcome: str) -> None:
        subject = trial.subject
        place = check, str(trial.dtype).removeprefix("torch.")
        self.outcomes.setdefault(subject, {}).setdefault(place, Counter())[outcome] += 1
        self.ended[subject] += 1
        if self.path is not None and outcome == "passed":
            if subject not in self.coverage:
                self.coverage[subject] = nothing_of(trial.table, CHECKS, subject.dtypes(trial.table))
            self.coverage[subject].add(check, trial.case, trial.dtype)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the counts, and judge the kernels all of whose trials were run."""
        wanted: Counter[Subject] = Counter()
        for tests in session.config.stash.get(GENERATED, {}).values():
            wanted.update(subject for subject in tests.get("test_kernel", {}).values() if subject is not None)
        for subject, outcomes in self.outcomes.items():
            if subject.kernel is None or subject.composite or self.ended[subject] < wanted[subject]:
                continue
            self.refused += [
                f"{subject} refused every trial of {check} in {dtype}: that proves nothing; take a case of it, or "
                f"leave {dtype} out of the kernel's dtypes"
                for check, dtype in absent(outcomes)
            ]
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.path is not None:
            made = {str(subject): coverage.to_json() for subject, coverage in self.coverage.items()}
            self.path.write_text(json.dumps(made, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was refused."""
        if self.refused:
            terminalreporter.section("refused checks", red=True)
            for sentence in self.refused:
                terminalreporter.write_line(f"FAILED: {sentence}")


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return "xfailed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return "refused" if reason.removeprefix("Skipped: ").startswith("refused: ") else "skipped"
    return report.outcome
