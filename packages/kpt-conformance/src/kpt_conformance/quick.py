"""`--kpt-quick`: every check on every kernel, on few trials, within two minutes."""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .extent import extent_of
from .subject import Subject
from .trial import Trial

#: By subject, case and dtype, whether the subject takes it.
Answers = dict[tuple[Subject, str, str], bool]
#: How the reason of a skip begins where the time is up.
_LATE = "--kpt-quick: "


class Quick:
    """A plugin that runs a part of the suite: the first trial of each check and kernel, then the second, and so on.

    Which trials these are depends on their names alone, so every run has the same ones. A check meets other cases than
    the next check does, but for a table's first one, and for those that tell (`Extent.telling`). Real models' shapes,
    and what a kernel refuses, are left to the whole suite.

    Args:
        seconds: what is not begun by then is left out; 0 leaves out nothing.
        trials: of a check on a kernel, at most; of `values`, which finds most faults, in each dtype.
        values: try `values` on every case.
        changed: kernels whose names have one of these have twice as many trials of each check.
    """

    def __init__(self, seconds: float, trials: int, *, values: bool = False, changed: Sequence[str] = ()) -> None:
        self.start = time.monotonic()
        self.seconds = seconds
        self.trials = trials
        self.values, self.changed = values, changed
        self.left_out = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep few trials, the first of each check before the second of any."""
        kept, rest = shortened(items, self.trials, values=self.values, changed=self.changed)
        config.hook.pytest_deselected(items=rest)
        items[:] = kept

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave out what would take too long."""
        if self.seconds and trial_of(item) is not None and time.monotonic() - self.start > self.seconds:
            pytest.skip(f"{_LATE}{self.seconds:.0f} seconds were up")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what was left out, by the processes of `-n` too."""
        if report.skipped and isinstance(report.longrepr, tuple) and _LATE in report.longrepr[2]:
            self.left_out += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say that there is more."""
        told = "that proves little; without --kpt-quick (and with -n auto, from pytest-xdist) the whole suite runs"
        but = f"{', but every case of values' * self.values}{f', twice of {len(self.changed)}' * bool(self.changed)}"
        most = f"at most {self.trials} trials of each check and kernel{but}"
        terminalreporter.write_line(f"--kpt-quick: {most}: {told}")
        if self.left_out:
            told = f"WARNING: {self.left_out} of them were left out after {self.seconds:.0f} s, and show nothing"
            terminalreporter.write_line(f"{told}: --kpt-quick-seconds=0 runs them", yellow=True)


def trial_of(item: pytest.Item) -> Trial | None:
    """Return the trial of a test of the suite, or None."""
    ours = getattr(getattr(item, "cls", None), "is_kpt_suite", False)
    trial = _parameters(item).get("trial") if ours else None
    return trial if isinstance(trial, Trial) else None


def shortened(
    items: list[pytest.Item], trials: int, *, values: bool = False, changed: Sequence[str] = ()
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that a quick run has, in its order, and those that it leaves out; arguments as of `Quick`."""
    answers: Answers = {}
    counts: Counter[tuple[object, ...]] = Counter()
    told: Counter[tuple[object, ...]] = Counter()
    rounds: dict[pytest.Item, int] = {}
    ordered = sorted(items, key=_turn)
    for item in (*filter(_tells, ordered), *ordered):
        trial = trial_of(item)
        if trial is None:
            rounds[item] = 0
            continue
        check = _check_of(item)
        if values and check.__name__ == "values":
            rounds[item] = trials
        elif not trial.case.model and item not in rounds:
            in_each_dtype = trial.dtype if check.__name__ == "values" else None
            group = item.parent, check.__name__, trial.subject, in_each_dtype
            # What the suite has once for a kernel takes long: it comes after all else, as far as there is time.
            late = extent_of(check).first_case
            most = 2 * trials if any(name in str(trial.subject) for name in changed) else trials
            # Cases that tell come first, but for two of any kind.
            most -= 2 if _tells(item) and counts[group] == told[group] else 0
            if counts[group] < (1 if late else most) and _taken(trial, answers):
                rounds[item] = trials if late else counts[group]
                counts[group] += 1
                told[group] += _tells(item)
    kept = [item for item in items if item in rounds]
    # What is tried on the fake device stays last: the device stays in the process.
    kept.sort(key=lambda item: ("device_check" in _parameters(item), rounds[item]))
    return kept, [item for item in items if item not in rounds]


def _turn(item: pytest.Item) -> tuple[bool, int]:
    """Return what puts items in their order: a table's first case, then any, always the same."""
    trial = trial_of(item)
    return trial is not None and trial.case is not trial.table.cases[0], zlib.crc32(item.name.encode())


def _tells(item: pytest.Item) -> bool:
    """Return whether an item's case tells something of its check that few do."""
    trial = trial_of(item)
    telling = extent_of(_check_of(item)).telling if trial is not None else ()
    if trial is None or trial.table.domain is None or not telling:
        return False
    first = {name: values[0] for name, values in trial.table.domain.options.items() if name in telling}
    return any(trial.case.sizes.get(name, value) != value for name, value in first.items())


def _check_of(item: pytest.Item) -> Callable[[Trial], None]:
    check: Callable[[Trial], None] = _parameters(item).get("check") or _parameters(item)["device_check"]
    return check


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _taken(trial: Trial, answers: Answers) -> bool:
    key = trial.subject, trial.case.name, str(trial.dtype)
    if key not in answers:
        try:
            made = trial.table.arguments(trial.case, dtype=trial.dtype, device=trial.subject.device)
            answers[key] = trial.refusal(made) is None or trial.stand_in() is not None
        except Exception:  # whatever is wrong is told by the test
            answers[key] = True
    return answers[key]
