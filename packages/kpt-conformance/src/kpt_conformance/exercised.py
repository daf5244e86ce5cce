"""What a run exercised, kernel by kernel: `--kpt-coverage`, and a failure where a kernel refused all of a check."""

import json
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .checks.catalog import CHECKS
from .coverage import EVERY_CHECK, Coverage, nothing_of
from .generation import GENERATED
from .refusals import SENT, Refusals
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
        self.coverage: dict[Subject, Coverage] = {}
        self.refusals = Refusals()

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
        judged = EVERY_CHECK if trial.dtype in trial.table.rare else check
        place = judged, str(trial.dtype).removeprefix("torch.")
        self.outcomes.setdefault(subject, {}).setdefault(place, Counter())[outcome] += 1
        if self.path is not None and outcome == "passed":
            if subject not in self.coverage:
                self.coverage[subject] = nothing_of(trial.table, CHECKS, subject.dtypes(trial.table))
            self.coverage[subject].add(check, trial.case, trial.dtype)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the counts, and have the kernels judged: here, or by the process that shared out the tests."""
        wanted: Counter[Subject] = Counter()
        for tests in session.config.stash.get(GENERATED, {}).values():
            wanted.update(subject for subject in tests.get("test_kernel", {}).values() if subject is not None)
        for subject, outcomes in self.outcomes.items():
            if subject.kernel is not None and not subject.composite:
                self.refusals.add(f"{subject.backend}: {subject}", wanted[subject], _counts(outcomes))
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[SENT] = self.refusals.found
        else:
            self.refusals.pytest_sessionfinish(session)
        if self.path is not None:
            made = {str(subject): coverage.to_json() for subject, coverage in self.coverage.items()}
            self.path.write_text(json.dumps(made, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was refused."""
        self.refusals.pytest_terminal_summary(terminalreporter)


def _counts(outcomes: Mapping[tuple[str, str], Counter[str]]) -> list[tuple[str, str, dict[str, int]]]:
    return [(check, dtype, dict(counts)) for (check, dtype), counts in outcomes.items()]


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return "xfailed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return "refused" if reason.removeprefix("Skipped: ").startswith("refused: ") else "skipped"
    return report.outcome
