"""A pytest plugin: a row for each test is on disk as soon as it ended, and what ends a process takes no other along.

With one worker of pytest-xdist or more a test that crashes its process, or that pytest-timeout ends with it, is told as
lost, and another worker goes on. The process that collects what the workers tell writes the rows.
"""

import contextlib
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
#: Seconds that one test may take.
PATIENCE = 120.0
#: Under which a report carries what a test found.
_FOUND = "gpu-row"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, as `__main__.py` gives them."""
    option = parser.getgroup("kpt", "KPT on a GPU").addoption
    option("--gpu-out", type=Path, help="folder of the part's report")
    option("--gpu-device", default="cuda", help="cpu interprets the kernels")
    option("--gpu-tiny", action="store_true", help="the smallest sizes")
    option(
        "--gpu-deadline", type=float, default=0.0, help="seconds since the epoch; what is not begun by then is left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Write rows, if a folder is named."""
    if config.getoption("--gpu-out") is not None:
        config.pluginmanager.register(_Rows(config), "kpt-gpu-rows")


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """What a test found, for its row."""
    found: Row = {}
    request.node.user_properties.append((_FOUND, found))
    return found


class _Rows:
    def __init__(self, config: pytest.Config) -> None:
        self.file: Path = config.getoption("--gpu-out") / "rows.jsonl"
        self.device: str = config.getoption("--gpu-device")
        self.deadline: float = config.getoption("--gpu-deadline")
        self.writes = not hasattr(config, "workerinput")
        self.lost = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Leave no test more time than there is."""
        if self.deadline:
            left = max(1.0, min(PATIENCE, self.deadline - time.time() + 5))
            item.add_marker(pytest.mark.timeout(left, method="thread"), append=False)
        return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave out what there is no time for."""
        if self.deadline and time.time() > self.deadline:
            pytest.skip("the time was over")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Look after a failure whether the device still answers."""
        report = yield
        if report.failed and not _answers(self.device):
            self.lost = True
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write how a test ended."""
        if not self.writes or (report.when in ("setup", "teardown") and report.passed):
            return
        found: Any = dict(report.user_properties).get(_FOUND, {})
        status = {"passed": "ok", "skipped": "left out"}.get(report.outcome, "failed")
        row = {"name": _name(report.nodeid), "status": status, "took": round(report.duration, 3), **found}
        if status == "left out" and isinstance(report.longrepr, tuple):
            row["error"] = report.longrepr[2].removeprefix("Skipped: ")
        elif status == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            told = str(report.longrepr) if crash is None else crash.message
            row |= {"status": "failed" if report.when in ("setup", "call", "teardown") else "lost", "error": told}
        self._write(row)

    def _write(self, row: Row) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, default=str) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write which file of checks could not be read."""
        if self.writes and report.failed:
            self._write({"name": f"collecting {report.nodeid}", "status": "failed", "error": str(report.longrepr)})

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """End a worker whose device is lost, after it has told of it: after a wrong access none ever answers again."""
        if self.lost and not self.writes:
            os._exit(1)


def _name(nodeid: str) -> str:
    """Return what a test tries: the id of its parameters if it has some, else its name in words."""
    file, _, name = nodeid.rpartition("::")
    function, _, parameters = name.partition("[")
    kind = Path(file.partition("::")[0]).stem.removeprefix("check_")
    return f"{kind}: {parameters.removesuffix(']') or function.removeprefix('test_').replace('_', ' ')}"


def _answers(device: str) -> bool:
    if device == "cpu":
        return True
    import devices
    import torch

    return devices.alive(torch.device(device))


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file, of each the last that was said, but what was found before stays."""
    rows: dict[str, Row] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the last one, of a process that was ended as it wrote
            row = json.loads(line)
            rows[row["name"]] = rows.get(row["name"], {}) | row
    return list(rows.values())


def first_line(row: Row) -> str:
    """Return the beginning of what went wrong, or was left out."""
    lines = str(row.get("error", "")).strip().splitlines()
    return next((line for line in lines if line.startswith("E ")), next(iter(lines), "")).removeprefix("E").strip()


def of_kind(rows: list[Row], kind: str) -> Iterator[Row]:
    """Yield the rows of a file of checks, under their names in it."""
    for row in rows:
        if row["name"].startswith(f"{kind}: "):
            yield row | {"name": row["name"].removeprefix(f"{kind}: ")}
