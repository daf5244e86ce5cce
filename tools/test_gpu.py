"""The program for GPUs runs from end to end without one, tells right from wrong, and outlives what it tests."""

import json
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parent
sys.path.insert(0, str(TOOLS / "gpu"))

import running  # noqa: E402  it lies in that folder
from rows import read_rows  # noqa: E402
from running import Job, link_source, run  # noqa: E402
from summary import write_summary  # noqa: E402


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of a tiny smoke test and a tiny benchmark, interpreted."""
    out = tmp_path_factory.mktemp("report")
    options = ["--device", "cpu", "--tiny", "--source", "--part", "smoke", "--part", "bench", "--out", str(out)]
    done = subprocess.run([sys.executable, str(TOOLS / "gpu"), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(out / 'SUMMARY.md').read_text()}"
    return out


def test_every_kernel_passes_the_smoke_test(report: Path) -> None:
    from kpt_backend_nvidia import BACKEND

    rows = read_rows(report / "smoke" / "rows.jsonl")
    assert {row["kernel"] for row in rows if "seconds" in row} == {kernel.forward for kernel in BACKEND.kernels()}
    assert {row["status"] for row in rows} <= {"ok", "left out"}
    if not torch.cuda.is_available():
        assert [row["name"] for row in rows if row["status"] == "left out"] == [
            "CUDA graph of MoELayer",
            "CUDA graph of a transformer layer",
            "device_info",
            "memory_stats",
            "NVIDIAMemoryManager",
        ]


def test_the_benchmark_measures_our_kernel_and_its_peers(report: Path) -> None:
    for group in ("decode", "prefill", "graph", "step"):
        for row in json.loads((report / "bench" / f"{group}.json").read_text())["lines"]:
            assert row["kernels"] == ["moe.experts: kpt_triton.moe.experts:forward"]
            results = {result["implementation"]: result for result in row["results"]}
            assert results.keys() >= {"kpt", "plain", "eager", "grouped_mm", "torch grouped_mm"}
            if group == "step":
                assert results["kpt"]["saved"] <= 1.05
                assert results["grouped_mm"]["saved"] > 1.5
    summary = (report / "SUMMARY.md").read_text()
    assert "| step tiny gpt-oss | saved | at most 1.05 |" in summary
    assert "interpreter took the GPU's place" in summary


#: A process with three rows; `what` happens in the second one.
WORKER = """
import os, sys, time
from pathlib import Path
from rows import run_rows

def second():
    {what}
    return {{"value": 2}}

jobs = [("first", lambda: {{"value": 1}}), ("second", second), ("third", lambda: {{"value": 3}})]
run_rows(Path({file!r}), jobs, lambda: {alive}, patience=1.0)
"""


def worked(tmp_path: Path, what: str, alive: bool = True, seconds: float = 60.0) -> tuple[bool, dict[str, Any]]:
    """Run a worker; whether the report is good, and its rows."""
    folder = tmp_path / "smoke"
    folder.mkdir()
    program = WORKER.format(what=what, alive=alive, file=str(folder / "rows.jsonl"))
    run(Job("log", ["-c", program], {"PYTHONPATH": str(TOOLS / "gpu")}, rows=True), folder, time.time() + seconds)
    return write_summary(tmp_path), {row["name"]: row for row in read_rows(folder / "rows.jsonl")}


@pytest.mark.parametrize(
    ("what", "alive", "status"),
    [
        ("pass", True, "ok"),
        ("from rows import LeftOutError; raise LeftOutError('not here')", True, "left out"),
        ("raise ValueError('odd')", True, "failed"),
        ("raise ValueError('odd')", False, "failed"),
        ("os.abort()", True, "lost"),
        ("time.sleep(600)", True, "lost"),
    ],
    ids=["passes", "is left out", "raises", "raises, and the device is lost", "crashes", "hangs"],
)
def test_what_a_row_breaks_takes_no_other_along(what: str, alive: bool, status: str, tmp_path: Path) -> None:
    good, rows = worked(tmp_path, what, alive)
    assert [row["status"] for row in rows.values()] == ["ok", status, "ok"]
    assert good == (status in ("ok", "left out"))
    assert ("second**" in (tmp_path / "SUMMARY.md").read_text()) == (status != "ok")


def test_a_part_ends_in_time_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.0)
    good, rows = worked(tmp_path, "time.sleep(0.9); os.kill(os.getpid(), 19)", seconds=1.5)
    assert not good
    assert [row["status"] for row in rows.values()] == ["ok", "lost"]
    assert "its time was over" in (tmp_path / "SUMMARY.md").read_text()


def test_a_worker_that_can_not_begin_is_not_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "smoke"
    folder.mkdir()
    run(Job("log", ["-c", "raise SystemExit('no device')"], {}, rows=True), folder, time.time() + 60)
    assert (folder / "log.txt").read_text().count("no device") == 1
    assert not write_summary(tmp_path)


def test_tests_that_the_time_does_not_suffice_for_are_interrupted_and_the_others_told(tmp_path: Path) -> None:
    folder = tmp_path / "conformance"
    folder.mkdir()
    (folder / "test_it.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): time.sleep(600)\ndef test_d(): pass\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml=it.xml", "test_it.py"]
    run(Job("it", command, {}, folder), folder, time.time() + 4)
    assert not write_summary(tmp_path)
    summary = (tmp_path / "SUMMARY.md").read_text()
    assert "**it**: stopped, its time was over; see conformance/it.txt" in summary
    assert "| it | 1 | 0 | 1 | `test_b` |" in summary  # neither the one that was stopped nor the next


def test_source_has_the_entry_points_of_what_is_built(tmp_path: Path) -> None:
    paths = link_source(TOOLS.parent, tmp_path / "site")
    found = {dist.metadata["Name"]: dist for dist in distributions(path=paths[:1])}
    assert found.keys() == {path.parent.name for path in TOOLS.parent.glob("packages/*/pyproject.toml")}
    (backend,) = (p for p in found["kpt-backend-nvidia"].entry_points if p.group == "kpt.backends")
    assert (backend.name, backend.value) == ("nvidia", "kpt_backend_nvidia:BACKEND")
    assert all(Path(path).is_dir() for path in paths)
