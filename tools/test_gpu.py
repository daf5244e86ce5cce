"""The program for GPUs runs from end to end without one, tells right from wrong, and outlives what it tests."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parent
sys.path.insert(0, str(TOOLS))

from gpu import supervising  # noqa: E402  the package lies beside this file
from gpu.installing import link_source  # noqa: E402
from gpu.plan import DEVICE_LOST, Plan  # noqa: E402
from gpu.rows import Rows, read_lines  # noqa: E402
from gpu.summary import write_summary  # noqa: E402
from gpu.supervising import supervise  # noqa: E402


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a tiny smoke test and a tiny benchmark, interpreted."""
    out = {part: tmp_path_factory.mktemp(part) for part in ("smoke", "bench")}
    command = [sys.executable, str(TOOLS / "gpu"), "--device", "cpu", "--tiny", "--source"]
    running = {
        part: subprocess.Popen([*command, "--part", part, "--out", str(folder)], stdout=subprocess.PIPE, text=True)
        for part, folder in out.items()
    }
    for part, process in running.items():
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, f"{part} ended with {process.returncode}:\n{said}"
    return out


def test_every_kernel_passes_the_smoke_test(report: dict[str, Path]) -> None:
    from kpt_backend_nvidia import BACKEND

    rows = {row["name"]: row for row in read_lines(report["smoke"] / "smoke" / "rows.jsonl")}
    tried = {row["kernel"] for row in rows.values() if "first forward and backward" in row}
    assert tried == {kernel.forward for kernel in BACKEND.kernels()}
    left_out = [name for name, row in rows.items() if row["status"] == "left out"]
    assert {row["status"] for row in rows.values()} <= {"ok", "left out"}
    if not torch.cuda.is_available():
        assert left_out == [
            "CUDA graph of MoELayer",
            "CUDA graph of a transformer layer",
            "device_info",
            "memory_stats",
            "NVIDIAMemoryManager",
        ]


def test_the_benchmark_measures_our_kernel_and_its_peers(report: dict[str, Path]) -> None:
    folder = report["bench"]
    rows = {row["name"]: row for row in read_lines(folder / "bench" / "rows.jsonl") if "results" in row}
    assert {row["phase"] for row in rows.values()} == {"forward", "graph", "training", "decode"}
    for row in rows.values():
        assert row["kernel"] == "kpt_triton.moe.experts:forward"
        peers = {"kpt", "kpt in plain PyTorch", "transformers eager", "transformers grouped_mm", "torch grouped_mm"}
        assert peers <= row["results"].keys()
        if row["phase"] == "training":
            result = row["results"]["kpt"]
            assert result["backward"]["seconds"] < result["forward+backward"]["seconds"]
            assert result["saved_over_least"] <= 1.05
            assert row["results"]["transformers grouped_mm"]["saved_over_least"] > 1.5
    last = (folder / "SUMMARY.md").read_text().rstrip().splitlines()[-1]
    assert last.startswith("| tiny gpt-oss")
    assert "interpreter took the GPU's place" in (folder / "SUMMARY.md").read_text()


@pytest.mark.parametrize("fault", ["result", "x", "weights", "up", "down"])
def test_a_wrong_result_or_gradient_gets_no_figure(fault: str, tmp_path: Path) -> None:
    from gpu.bench import _outcome
    from gpu.loads import TINY_LOADS, problem_of
    from gpu.machine import Machine
    from gpu.oracle import faults

    problem = problem_of(TINY_LOADS[0], Machine(plan("bench", tmp_path)))
    problem.require_gradients(True)
    right = _outcome(problem, training=True)
    wrong = {**right, fault: right[fault] + 1e-5 * right[fault].abs().mean()}
    assert faults(problem, right, right)[0] == []
    (sentence,), _ = faults(problem, wrong, right)
    assert sentence.startswith("result" if fault == "result" else f"gradient of {fault}")


def plan(part: str, out: Path, seconds: float = 60.0) -> Plan:
    return Plan(
        part=part,
        out=out,
        device="cpu",
        tiny=True,
        jobs=1,
        commit="",
        deadline=time.time() + seconds,
        checkout=TOOLS.parent,
    )


#: A worker with three rows; `what` happens in the second one.
WORKER = """
import os, sys, time
sys.path.insert(0, {tools!r})
from pathlib import Path
from gpu.rows import Rows

def second():
    {what}
    return {{"value": 2}}

alive = {alive}
jobs = [("first", lambda: {{"value": 1}}), ("second", second), ("third", lambda: {{"value": 3}})]
Rows(Path({folder!r})).run(jobs, lambda: alive)
"""


def supervised(tmp_path: Path, what: str, *, alive: bool = True, seconds: float = 60.0) -> tuple[str, dict[str, Any]]:
    given = plan("smoke", tmp_path, seconds)
    given.folder.mkdir()
    program = WORKER.format(tools=str(TOOLS), what=what, alive=alive, folder=str(given.folder))
    ending = supervise([sys.executable, "-c", program], {}, given)
    return ending, {row["name"]: row for row in read_lines(given.folder / "rows.jsonl")}


@pytest.mark.parametrize(
    ("what", "alive", "status", "error"),
    [
        ("raise ValueError('odd')", True, "failed", "ValueError: odd"),
        ("raise ValueError('odd')", False, "failed", "ValueError: odd"),
        ("os._exit(9)", True, "lost", "the process ended with 9"),
        ("os.abort()", True, "lost", "the process ended with -6"),
    ],
    ids=["raises", "raises, and the device is lost", "ends the process", "crashes"],
)
def test_what_a_row_breaks_takes_no_other_along(
    what: str, alive: bool, status: str, error: str, tmp_path: Path
) -> None:
    ending, rows = supervised(tmp_path, what, alive=alive)
    assert ending == "complete"
    assert list(rows) == ["first", "second", "third"]
    assert (rows["second"]["status"], rows["second"]["error"]) == (status, error)
    assert rows["third"]["value"] == 3


def test_a_row_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "PATIENCE", 1.0)
    ending, rows = supervised(tmp_path, "time.sleep(600)")
    assert ending == "complete"
    assert (rows["second"]["status"], rows["third"]["value"]) == ("lost", 3)


def test_a_part_ends_in_time_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_GRACE", 0.0)
    ending, rows = supervised(tmp_path, "time.sleep(600)", seconds=1.5)
    assert ending == "stopped, its time was over"
    assert rows["first"]["value"] == 1
    assert rows["second"]["status"] == "lost"
    assert "third" not in rows


def test_a_worker_that_can_not_begin_is_not_begun_again(tmp_path: Path) -> None:
    given = plan("smoke", tmp_path)
    given.folder.mkdir()
    ending = supervise([sys.executable, "-c", "raise SystemExit('no device')"], {}, given)
    assert ending.startswith("broken off, its process ended with 1")
    assert "no device" in (given.folder / "log.txt").read_text()


def test_a_process_that_loses_its_device_says_so(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(SystemExit) as ended:
        Rows(tmp_path).run([("kernel", broken)], lambda: False)
    assert ended.value.code == DEVICE_LOST
    assert read_lines(tmp_path / "rows.jsonl")[0]["status"] == "failed"


TESTS = """
import os

def test_a(): pass
def test_b(): os._exit(75)
def test_c(): assert 1 == 2, "odd"
def test_d(): pass
"""


def test_a_test_that_loses_the_device_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu.conformance import _pytest
    from gpu.machine import Machine

    given = plan("conformance", tmp_path)
    given.folder.mkdir()
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTHONPATH", str(TOOLS))
    row = _pytest(Machine(given), "it", [str(tmp_path / "test_it.py")], tmp_path, "", "")
    assert row["counts"] == {"passed": 2, "lost": 1, "failed": 1}
    assert [name.rpartition("::")[2] for name in row["failing"]] == ["test_b", "test_c"]
    assert row["status"] == "failed"


@pytest.mark.parametrize("slow", ["time.sleep(1.5)", "time.sleep(600)"], ids=["slow", "hangs"])
def test_tests_that_the_time_does_not_suffice_for_are_counted(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import conformance
    from gpu.machine import Machine

    monkeypatch.setattr(conformance, "_ENDING", 4.5)
    given = plan("conformance", tmp_path, seconds=6.0)
    given.folder.mkdir()
    functions = [f"def test_{name}(): {slow if name == 'b' else 'time.sleep(1)'}" for name in "abcdef"]
    (tmp_path / "test_it.py").write_text("\n".join(["import time", *functions]))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTHONPATH", str(TOOLS))
    row = conformance._pytest(Machine(given), "it", [str(tmp_path / "test_it.py")], tmp_path, "", "")
    assert row["status"] == "left out"
    assert row["not_run"] + sum(row["counts"].values()) == 6
    assert row["not_run"] > 0
    assert row["failing"] == []


@pytest.mark.parametrize(
    ("change", "good"),
    [
        (lambda rows: None, True),
        (lambda rows: rows.add("b", "left out", reason="not here"), True),
        (lambda rows: rows.add("b", "failed", error="E: wrong\nmore"), False),
        (lambda rows: rows.add("b", "lost", error="crashed"), False),
    ],
    ids=["ok", "left out", "failed", "lost"],
)
def test_the_summary_tells_what_failed(change: Callable[[Rows], None], good: bool, tmp_path: Path) -> None:
    rows = Rows(tmp_path / "smoke")
    rows.add("a", "ok")
    change(rows)
    (tmp_path / "smoke" / "state.json").write_text(json.dumps({"ending": "complete", "minutes": 1}))
    assert write_summary(tmp_path) is good
    text = (tmp_path / "SUMMARY.md").read_text()
    said = [str(row.get("error") or row.get("reason")).splitlines()[0] for row in rows.rows[1:]]
    assert all(f"b: {each}" in text.replace("**", "") for each in said)


def test_source_has_the_entry_points_of_what_is_built(tmp_path: Path) -> None:
    paths = link_source(TOOLS.parent, tmp_path / "site")
    found = {dist.metadata["Name"]: dist for dist in distributions(path=paths[:1])}
    assert found.keys() == {path.parent.name for path in TOOLS.parent.glob("packages/*/pyproject.toml")}
    (backend,) = (p for p in found["kpt-backend-nvidia"].entry_points if p.group == "kpt.backends")
    assert (backend.name, backend.value) == ("nvidia", "kpt_backend_nvidia:BACKEND")
    assert all(Path(path).is_dir() for path in paths)
