"""How the trials of each kernel ended: for a report, coverage, and the failure of a run that proves nothing.

Nothing heavy is imported here: the plugin is there in other projects' runs too.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

#: How the reason of a skip begins where the kernel refuses; where there was nothing to try it is any other sentence.
REFUSED = "refused: "
#: Under which a test's report carries what it is about, from the processes of `-n` too.
_PROPERTY = "kpt"
_PARTS = ("check", "device_check", "declared")
#: Instead of a check, for a dtype that few use: a check has too few trials in it for one that was refused to tell.
EVERY_CHECK = "every check"
#: The check whose trials tell how much of its op a kernel takes.
_MEASURE = "values"
#: How `kpt_core` begins what it says of a kernel whose functions can't be had.
_BROKEN = "could not be loaded: "
_NO_MODULE = "its module can't be imported"
#: Characters of a reason that are shown, and how much of what a kernel never took.
_LONGEST, _MOST = 160, 8


class Outcomes:
    """A plugin that counts how tests of the suite end, in this process or in those of `-n`.

    It fails a run in which a kernel refused every trial of a check in a dtype that it claims. A kernel of which a part
    was not run is not judged. It also says what a kernel refused always of what its op documents.

    Args:
        report: where to write a report; None for nowhere.
        coverage: likewise what passed of each op; only where every test is in this process.
    """

    def __init__(self, report: Path | None = None, coverage: Path | None = None) -> None:
        self.report, self.coverage = report, coverage
        self.found: dict[str, dict[str, dict[str, Counter[str]]]] = {}  # by kernel, dtype and check, how tests ended
        self.judged: dict[str, dict[tuple[str, str], Counter[str]]] = {}  # likewise trials, by kernel, check and dtype
        self.wanted: dict[str, int] = {}  # by kernel, how many trials there are
        self.reasons: dict[str, dict[tuple[str, str], Counter[str]]] = {}  # as `judged`: why trials were refused
        self.met: dict[str, dict[str, set[str]]] = {}  # by kernel and what a trial meets of the op, how trials ended
        self.exercised: dict[Any, Any] = {}  # by subject, its coverage
        self.backend = self.device = ""
        self.interpreted = self.deselected = False
        self.sentences: list[str] = []
        self.warnings: list[str] = []
        self.untried: list[str] = []
        self._trials: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Write on each test of the suite what it is about."""
        ours = [item for item in items if getattr(getattr(item, "cls", None), "is_kpt_suite", False)]
        if not ours:
            return
        from .coverage import labels_of
        from .generation import GENERATED
        from .interpreter import interpreting
        from .report import DECLARED
        from .subject import Subject
        from .trial import Trial

        generated = config.stash.get(GENERATED, {}).values()
        wanted = Counter(subject for tests in generated for subject in tests.get("test_kernel", {}).values())
        for item in ours:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            trial = parameters.get("trial")
            subject = trial.subject if isinstance(trial, Trial) else parameters.get("subject")
            if not isinstance(subject, Subject):
                continue  # a layer's, or one without parameters
            check = next((parameters[name].__name__ for name in _PARTS if name in parameters), "wrong_input")
            dtype, judged = DECLARED, ""
            if isinstance(trial, Trial):
                dtype = str(trial.dtype).removeprefix("torch.")
                if "check" in parameters:
                    self._trials[item.nodeid] = check, trial
                    judged = EVERY_CHECK if trial.dtype in trial.table.rare else check
            if not subject.composite:  # which is no kernel of the backend's own
                names = subject.backend, subject.op.name, subject.target, dtype, check, str(subject.device)
                interpreted = interpreting() and subject.direct
                met = labels_of(trial) if isinstance(trial, Trial) and judged and subject.kernel is not None else ()
                about = [*names, interpreted, "" if subject.kernel is None else judged, wanted[subject], list(met)]
                item.user_properties.append((_PROPERTY, about))

    def pytest_deselected(self) -> None:
        """Note that not all was run."""
        self.deselected = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count how a test ended."""
        about: Any = dict(report.user_properties).get(_PROPERTY)
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = outcome_of(report)
        if about is not None:
            self.backend, op, target, dtype, check, self.device, interpreted, judged, wanted, met = about
            self.interpreted = self.interpreted or bool(interpreted)
            checks = self.found.setdefault(f"{op} {target}", {}).setdefault(dtype, {})
            checks.setdefault(check, Counter())[outcome] += 1
            if judged:
                reason = reason_of(_told(report), self.backend, target) if outcome == "refused" else ""
                self.add(f"{self.backend}: {op}-{target}", wanted, judged, dtype, {outcome: 1}, reason, met)
        if self.coverage is not None and outcome == "passed" and report.nodeid in self._trials:
            self._cover(*self._trials[report.nodeid])

    def add(
        self,
        kernel: str,
        wanted: int,
        check: str,
        dtype: str,
        outcomes: dict[str, int],
        reason: str = "",
        met: Iterable[str] = (),
    ) -> None:
        """Count how some trials of a kernel ended, of as many as are wanted.

        Args:
            kernel: its name.
            wanted: how many trials there are of it.
            check: that they are of.
            dtype: that they are in.
            outcomes: how many ended how.
            reason: why they were refused.
            met: what they meet of what the op documents.
        """
        self.wanted[kernel] = wanted
        self.judged.setdefault(kernel, {}).setdefault((check, dtype), Counter()).update(outcomes)
        if reason:
            self.reasons.setdefault(kernel, {}).setdefault((check, dtype), Counter())[reason] += 1
        for each in met:
            self.met.setdefault(kernel, {}).setdefault(each, set()).update(outcomes)

    def _cover(self, check: str, trial: Any) -> None:
        from .checks.catalog import CHECKS
        from .coverage import nothing_of

        if trial.subject not in self.exercised:
            dtypes = trial.subject.dtypes(trial.table)
            self.exercised[trial.subject] = nothing_of(trial.table, CHECKS, dtypes)
        self.exercised[trial.subject].add(check, trial.case, trial.dtype)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge the kernels all of whose trials were run, and write what is asked for."""
        if hasattr(session.config, "workerinput"):
            return  # the process that shares out the tests counts them
        self.judge()
        if self.sentences and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.report is not None and self.found:
            _report(self.report, self, session)
        if self.coverage is not None and self._trials:
            made = {str(subject): coverage.to_json() for subject, coverage in self.exercised.items()}
            self.coverage.write_text(json.dumps(made, indent=1) + "\n")

    def judge(self) -> None:
        """Say which kernels refused all of a check, or most of what the suite asks."""
        for kernel, places in self.judged.items():
            if sum(map(Counter.total, places.values())) < self.wanted[kernel]:
                continue
            why = self.reasons.get(kernel, {})
            broken = next((each for counts in why.values() for each in counts if each.startswith(_BROKEN)), None)
            if broken is not None:  # one sentence says more than one for each check and dtype
                self.sentences.append(f"{kernel} was never tried, because {_as_exception(broken)}")
                continue
            self.untried += _never(kernel, self.met.get(kernel, {}))
            self.sentences += [
                f"{kernel} refused every trial of {check} in {dtype}: that proves nothing; take a case of it, or "
                f"leave {dtype} out of the kernel's dtypes{_most_frequent(why.get((check, dtype), Counter()))}"
                for (check, dtype), counts in places.items()
                # What found nothing to try (no padding, for instance) counts neither way; what failed was run.
                if counts["refused"] and not (counts["passed"] or counts["failed"])
            ]
            counts = sum((found for (check, _), found in places.items() if check == _MEASURE), Counter[str]())
            if 2 * counts["refused"] > counts.total():
                self.warnings.append(
                    f"{kernel} refused {counts['refused']} of {counts.total()} trials of {_MEASURE}: little of what "
                    "the op documents was tried"
                )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was refused, and where the report is."""
        told = (
            ("WARNING", "refused cases", self.warnings, "yellow"),
            ("FAILED", "refused checks", self.sentences, "red"),
        )
        for word, title, sentences, colour in told:
            if sentences:
                terminalreporter.section(title, **{colour: True})
            for sentence in sentences:
                terminalreporter.write_line(f"{word}: {sentence}")
        if self.untried:
            terminalreporter.section("never tried, because it was refused")
            for sentence in self.untried:
                terminalreporter.write_line(sentence)
            terminalreporter.write_line("--kpt-coverage=FILE writes all of it")
        if self.report is not None:
            terminalreporter.write_line(f"--kpt-report: {self.report if self.found else 'nothing was run'}")


def outcome_of(report: pytest.TestReport) -> str:
    """Return how a test ended: `passed`, `failed` (also if that was expected), `refused`, or `skipped` otherwise."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return "failed" if report.skipped else report.outcome
    return "refused" if _told(report).startswith(REFUSED) else "skipped"


def _told(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")


def reason_of(told: str, backend: str, target: str) -> str:
    """Return what a kernel itself says in the reason of a skip, which lists every other kernel too: one short line."""
    lines = told.removeprefix(REFUSED).splitlines() or [""]
    own = f"{backend} ({target}): "
    reason = next((line.strip().removeprefix(own) for line in lines if line.strip().startswith(own)), lines[0])
    return reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 3]}..."


def _most_frequent(reasons: Counter[str]) -> str:
    """Return the two reasons that were given most often, as the end of a sentence."""
    told = [f"{_as_exception(reason)} ({count} times)" for reason, count in reasons.most_common(2)]
    return f". It said: {'; '.join(told)}" if told else ""


def _as_exception(reason: str) -> str:
    """Return a reason that tells of an exception as a clause of its own; others as they are."""
    if not reason.startswith(_BROKEN):
        return reason
    error = reason.removeprefix(_BROKEN)
    imported = error.startswith(("ModuleNotFoundError", "ImportError"))
    return f"{_NO_MODULE if imported else 'it could not be loaded'}: {error}"


def _never(kernel: str, met: dict[str, set[str]]) -> list[str]:
    """Return a sentence of what a kernel always refused, or none."""
    never = sorted(e for e, outcomes in met.items() if "refused" in outcomes and not outcomes & {"passed", "failed"})
    if not never:
        return []
    more = f" and {len(never) - _MOST} more" if len(never) > _MOST else ""
    return [f"{kernel} never tried: {', '.join(never[:_MOST])}{more}"]


def _report(file: Path, run: Outcomes, session: pytest.Session) -> None:
    """Write the report of a run of the suite."""
    import torch

    import kpt_core
    from kpt_core import KptError

    from .report import chip_name, columns_of, versions, write

    backend = kpt_core.backends().get(run.backend)
    try:
        library = dict(backend.library()) if backend is not None else {}
    except KptError as error:
        library = {"library": str(error)}
    write(
        file,
        session.config.invocation_params.dir,
        backend=run.backend,
        level="interpreted" if run.interpreted else "ran",
        chip=chip_name(torch.device(run.device), library.get("isa")),
        device=torch.device(run.device).type,
        selection=_selection(session, run.deselected),
        versions=versions() | {name: library[name] for name in ("isa", "compiler") if name in library},
        kernels={kernel: columns_of(run.found[kernel]) for kernel in sorted(run.found)},
    )


def _selection(session: pytest.Session, deselected: bool) -> str:
    options = session.config.option
    asked = [f"-k {options.keyword}"] * bool(options.keyword) + ["--kpt-quick"] * bool(options.kpt_quick)
    if not asked and deselected:
        asked = ["some tests were deselected"]
    if session.shouldstop or session.shouldfail:
        asked.append("broken off")
    return ", ".join(asked) or "all"
