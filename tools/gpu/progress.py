"""A pytest plugin: outcomes are written as they are known, and a run ends in time and where its device is lost."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .plan import DEVICE_LOST
from .rows import read_lines

#: Environment variables: the file of the outcomes, the kernel whose tests are run ("" for all), and when to end.
OUTCOMES, TARGET, DEADLINE = "KPT_GPU_OUTCOMES", "KPT_GPU_TARGET", "KPT_GPU_DEADLINE"


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write."""
    config.pluginmanager.register(_Progress(Path(os.environ[OUTCOMES])), "gpu-progress")


class _Progress:
    def __init__(self, path: Path) -> None:
        self.lock = path.with_name(".large.lock")
        self.known = {row["id"] for row in read_lines(path) if "id" in row}
        self.target = os.environ.get(TARGET, "")
        self.deadline = float(os.environ[DEADLINE])
        self.stream = path.open("a", encoding="utf-8")
        self.left = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what another process has done, or does."""
        chosen = [item for item in items if item.nodeid not in self.known and self._wanted(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
        self.left = len(chosen)

    def _wanted(self, item: pytest.Item) -> bool:
        if not self.target:
            return True
        return any(getattr(getattr(v, "subject", v), "target", None) == self.target for v in _parameters(item))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that ends the process leaves this line alone."""
        self._write(id=nodeid, outcome="begun", left=self.left)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's outcome: that of its call, or of what kept it from being called."""
        if report.when == "call" or report.outcome != "passed":
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self.left -= report.when != "teardown"
            message = "" if report.passed or report.skipped else _message(report)
            self._write(
                id=report.nodeid, outcome=outcome, seconds=round(report.duration, 3), message=message, left=self.left
            )

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """End the process where every further test would fail, for the next one to go on."""
        if not _alive():
            os._exit(DEVICE_LOST)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End in time, so that what passed wholly is recorded; and have one large case at a time in memory."""
        if time.time() > self.deadline:
            item.session.shouldstop = "the time is over"
        if not any(case.large for case in _cases(item)):
            return (yield)
        with self.lock.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                return (yield)
            finally:
                _give_memory_back()

    def _write(self, **row: Any) -> None:
        self.stream.write(json.dumps(row) + "\n")
        self.stream.flush()


def _parameters(item: pytest.Item) -> list[Any]:
    called = getattr(item, "callspec", None)
    return [] if called is None else list(called.params.values())


def _cases(item: pytest.Item) -> list[Any]:
    """The cases of an op that a test is about."""
    return [value.case for value in _parameters(item) if hasattr(value, "case")]


def _give_memory_back() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(getattr(crash, "message", report.longrepr)).splitlines()[0][:500]


def _alive() -> bool:
    if "torch" not in sys.modules:
        return True
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
