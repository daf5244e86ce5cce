"""What a run of the suite proved, kernel by kernel, for the records of evidence."""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kpt_core import KptError

from .coverage import EVERY_CHECK, absent
from .evidence import Outcomes, record_success
from .evidence.recording import IN_PACKAGES
from .evidence.tiles import observe
from .generation import GENERATED, by_subject
from .trial import Subject, Trial

#: How the reason of a skip begins where the kernel refuses; where there was nothing to try it is any other sentence.
REFUSED = "refused: "
_PARTS = ("check", "device_check", "declared")


@dataclass(slots=True)
class _Test:
    """How a test ended: of which check and dtype, a rare one or not, and why it was skipped."""

    place: tuple[str, str]
    outcome: str = "not run"
    reason: str = ""
    rare: bool = False


@dataclass(slots=True)
class _Tally:
    """The tests of one subject."""

    tests: list[_Test] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self.tests)

    def by_place(self) -> dict[tuple[str, str], Counter[str]]:
        counts: dict[tuple[str, str], Counter[str]] = {}
        for test in self.tests:
            if test.place[1]:  # declarations and wrong input have no dtype, and are no trials
                place = (EVERY_CHECK, test.place[1]) if test.rare else test.place
                counts.setdefault(place, Counter())[test.outcome] += 1
        return counts


class Ledger:
    """A plugin that records each kernel all of whose tests were run and none failed or was absent without leave.

    Args:
        folder: of the records; `package` for the packages that offer the kernels.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = None if str(folder) == IN_PACKAGES else folder
        self.outcomes: dict[tuple[type, str], _Test] = {}
        self.written: list[Path] = []
        self.left_out: dict[str, str] = {}
        self._tiles: dict[Subject, set[str]] = {}
        self._running: Subject | None = None
        observe(self._note)

    def _note(self, tile: str) -> None:
        if self._running is not None:
            self._tiles.setdefault(self._running, set()).add(tile)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note whose tiles run."""
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        trial = parameters.get("trial")
        self._running = trial.subject if isinstance(trial, Trial) else None
        try:
            return (yield)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note how a test ended."""
        report = yield
        if isinstance(item, pytest.Function) and item.cls is not None and hasattr(item, "callspec"):
            test = self.outcomes.setdefault((item.cls, str(item.callspec.id)), _test_of(item.callspec.params))
            outcome, reason = outcome_of(report)
            if (report.when == "call" or outcome != "passed") and test.outcome != "failed":
                test.outcome, test.reason = outcome, reason
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records."""
        for cls, tests in session.config.stash.get(GENERATED, {}).items():
            for subject, names in by_subject(tests).items():
                self._enter(subject, _Tally([self.outcomes.get((cls, name), _Test(("", ""))) for name in names]))

    def _enter(self, subject: Subject, tally: _Tally) -> None:
        if subject.composite:
            return  # no kernel of the backend's own
        # What fails as `xfails.txt` expects is not proven either.
        missing = [f"{tally.count(kind)} {kind}" for kind in ("failed", "xfailed", "not run") if tally.count(kind)]
        if not missing and not tally.count("passed"):
            missing = ["none passed"]
        if not missing and subject.kernel is not None:
            missing = _not_let_pass(tally)
        if missing:
            self.left_out[str(subject)] = ", ".join(missing)
            return
        outcomes = Outcomes(
            each="".join(test.outcome[0] for test in tally.tests),
            absent=tuple(absences(tally.tests)),
            tiles=frozenset(self._tiles.get(subject, ())),
        )
        where = {"op": subject.op.name, "kernel": subject.target, "backend": subject.backend}
        try:
            self.written.append(record_success(self.folder, device=subject.device, outcomes=outcomes, **where))
        except KptError as error:
            self.left_out[str(subject)] = str(error)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was recorded, and what was not."""
        terminalreporter.section("evidence")
        for path in self.written:
            terminalreporter.write_line(f"recorded {path}")
        for subject, reason in self.left_out.items():
            terminalreporter.write_line(f"not recorded: {subject} ({reason})")


def outcome_of(report: pytest.TestReport) -> tuple[str, str]:
    """How a test ended, and why if it was skipped."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return ("xfailed" if report.skipped else report.outcome), ""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = told.removeprefix("Skipped: ")
    return ("refused" if reason.startswith(REFUSED) else "skipped"), reason


def absences(tests: Iterable[_Test]) -> list[dict[str, Any]]:
    """What no test passed for, an entry for each check: dtypes, how many were refused and skipped, a reason."""
    by_check: dict[str, dict[str, list[_Test]]] = {}
    for test in tests:
        check, dtype = test.place
        by_check.setdefault(check, {}).setdefault(dtype, []).append(test)
    found = []
    for check, dtypes in sorted(by_check.items()):
        left = {
            d: of_dtype for d, of_dtype in dtypes.items() if {t.outcome for t in of_dtype} <= {"refused", "skipped"}
        }
        without = [test for of_dtype in left.values() for test in of_dtype]
        if without:
            found.append(
                {
                    "check": check,
                    "dtypes": sorted(filter(None, left)),
                    "refused": sum(test.outcome == "refused" for test in without),
                    "skipped": sum(test.outcome == "skipped" for test in without),
                    "reason": max(without, key=lambda test: test.outcome == "refused").reason.splitlines()[0][:200],
                }
            )
    return found


def _not_let_pass(tally: _Tally) -> list[str]:
    return [f"it refused every trial of {check} in {dtype}" for check, dtype in absent(tally.by_place())]


def _test_of(parameters: Mapping[str, Any]) -> _Test:
    # pytest has something else than a check where there is nothing to try.
    named = (getattr(parameters.get(name), "__name__", None) for name in _PARTS)
    check = next(filter(None, named), "wrong_input")
    trial = parameters.get("trial")
    if not isinstance(trial, Trial):
        return _Test((check, ""))
    return _Test((check, str(trial.dtype).removeprefix("torch.")), rare=trial.dtype in trial.table.rare)
