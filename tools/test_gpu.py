"""The program for GPUs runs from end to end without one, tells right from wrong, and outlives what it tests."""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

import kpt_core

TOOLS = Path(__file__).parent
sys.path[:0] = [str(TOOLS / "gpu"), str(TOOLS.parent / "benchmarks")]

from check_times import programs  # noqa: E402  they lie in that folder
from packages import link_source  # noqa: E402
from rows import read_rows  # noqa: E402
from summary import write_summary  # noqa: E402


def tool(command: str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    options = [command, "--dry-run", "--source", "--jobs", "2", "--out", str(out), *more]
    return subprocess.run([sys.executable, str(TOOLS / "gpu"), *options], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of both commands, one after the other as on a device."""
    out = tmp_path_factory.mktemp("report")
    for command in ("prove", "suite"):
        done = tool(command, out)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(out / 'SUMMARY.md').read_text()}"
    return out


def test_every_kernel_is_right_and_what_needs_a_device_says_so(report: Path) -> None:
    from kpt_backend_nvidia import BACKEND
    from kpt_core.contract import GPU

    rows = read_rows(report / "prove" / "rows.jsonl")
    torchs = kpt_core.backends()["torch"].kernels()
    kernels = (*BACKEND.kernels(), *(kernel for kernel in torchs if GPU in kernel.requires))
    # Products by blocks are cuBLAS's alone.
    taken_here = {kernel.forward for kernel in kernels if "gpu_scaled_mm_blocks" not in kernel.forward}
    assert {row["kernel"] for row in rows if row.get("seconds")} == taken_here
    if not torch.cuda.is_available():
        assert [row["name"] for row in rows if row["status"] != "ok"] == [
            "choices: experts in 8 bits: widened in the kernel, or before",
            "uses: cuda graph of a layer of experts",
            "uses: cuda graph of a transformer layer",
            "uses: device info",
            "uses: memory stats",
            "uses: memory manager",
        ]


def test_what_is_measured_is_what_a_gpu_would_be_served(report: Path) -> None:
    rows = {row["name"]: row for row in read_rows(report / "prove" / "rows.jsonl")}
    lines = [row["line"] for name, row in rows.items() if name.startswith("peers: ")]
    served = {kernel.partition(": ")[2] for line in lines for kernel in line["kernels"]}
    assert served >= {
        "kpt_triton.moe.experts:forward",
        "kpt_attention.torch_kernels.gpu_sdpa:forward",
        "kpt_attention.torch_kernels.gpu_flex:forward",
        "kpt_triton.attention.paged:forward",
        "kpt_triton.fp8.linear:forward",
        "kpt_fp8.torch_kernels.gpu_linear:forward",
        "kpt_fp8.torch_kernels.gpu_scaled_mm:forward",
    }
    groups = {line["group"] for line in lines}
    assert groups == {"attention", "attention step", "pages", "fp8", "step", "decode", "prefill", "graph"}
    for line in lines:
        results = {result["implementation"]: result for result in line["results"]}
        assert len(results) > 1
        if line["group"] == "step":
            assert results["kpt"]["saved"] <= 1.05
            assert results["grouped_mm"]["saved"] > 1.5
    assert all(len(row["sides"]) > 1 for row in rows.values() if row["name"].startswith("choices") and "sides" in row)


def test_the_summary_tells_of_all(report: Path) -> None:
    summary = (report / "SUMMARY.md").read_text()
    for told in (
        "| step tiny gpt-oss | saved | at most 1.05 |",
        "interpreter took the GPU's place",
        "| suite | nvidia | ok |",
        "| kpt_triton.moe.gating:forward | 3 | 0 | 0 | 0 |",
        "## Time of each program",
        "## A and B, in turn",
    ):
        assert told in summary
    (evidence,) = (report / "evidence").glob("*-nvidia-cpu.json")
    assert json.loads(evidence.read_text())["kernels"]


def test_a_trace_tells_of_programs_and_of_nothing_else() -> None:
    told = {"registers per thread": 168, "shared memory": 98304, "blocks per SM": 1.5, "est. achieved occupancy %": 25}
    run = {"ph": "X", "cat": "kernel", "name": "up_kernel", "ts": 1.0, "args": told}
    events = [{**run, "dur": us} for us in (10.0, 12.0, 14.0)]
    events += [{**run, "name": "small", "dur": 1.0}] * 6 + [{"cat": "cpu_op", "name": "aten::mm", "dur": 99.0}]
    first, second = programs(events)
    assert first == {
        "program": "up_kernel", "us": 12.0, "launches": 1.0, "registers": 168, "shared": 98304, "blocks_per_sm": 1.5,
        "occupancy": 25,
    }  # fmt: skip
    assert (second["program"], second["launches"]) == ("small", 2.0)


#: Checks of which `what` happens in the second one.
CHECKS = """
import os, time
import pytest, rows

rows.PATIENCE = 1.0
rows._answers = lambda device: {alive}

def test_first(row): row["value"] = 1
def test_second(row): {what}
def test_third(row): row["value"] = 3
"""
#: One more, of a large case.
LARGE = """
class Large:
    case = type("Case", (), {"large": True})

@pytest.mark.parametrize("it", [Large], ids=["large"])
def test_it(it, row): pass
"""


def checked(tmp_path: Path, what: str, alive: bool = True, seconds: float = 60.0) -> tuple[bool, dict[str, Any]]:
    """Run checks; whether the report is good, and its rows."""
    folder = tmp_path / "prove"
    folder.mkdir()
    file = tmp_path / "check_it.py"
    file.write_text(CHECKS.format(what=what, alive=alive) + LARGE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = ["-m", "pytest", "-p", "rows", "-p", "no:cacheprovider", "-n", "1", "-c", str(tmp_path / "pytest.ini")]
    command += [
        str(file),
        "--gpu-out",
        str(folder),
        "--gpu-device",
        "cpu",
        "--gpu-deadline",
        str(time.time() + seconds),
    ]
    command[4:4] = ["-p", "large_cases"]
    env = os.environ | {"PYTHONPATH": str(TOOLS / "gpu"), "KPT_GPU_LOCK": str(tmp_path / "lock")}
    subprocess.run([sys.executable, *command], env=env, capture_output=True, check=False)
    return write_summary(tmp_path), {row["name"]: row for row in read_rows(folder / "rows.jsonl")}


@pytest.mark.parametrize(
    ("what", "alive", "status"),
    [
        ("pass", True, "ok"),
        ("pytest.skip('not here')", True, "left out"),
        ("raise ValueError('odd')", True, "failed"),
        ("raise ValueError('odd')", False, "lost"),
        ("os.abort()", True, "lost"),
        ("time.sleep(600)", True, "lost"),
    ],
    ids=["passes", "is left out", "raises", "raises, and the device is lost", "crashes", "hangs"],
)
def test_what_a_check_breaks_takes_no_other_along(what: str, alive: bool, status: str, tmp_path: Path) -> None:
    good, rows = checked(tmp_path, what, alive)
    assert [rows[f"it: {name}"]["status"] for name in ("first", "second", "third")] == ["ok", status, "ok"]
    assert rows["it: third"]["value"] == 3
    assert good == (status in ("ok", "left out"))
    assert ("second**" in (tmp_path / "SUMMARY.md").read_text()) == (status != "ok")


def test_what_there_is_no_time_for_is_left_out_and_told(tmp_path: Path) -> None:
    good, rows = checked(tmp_path, "time.sleep(0.5)", seconds=-1.0)
    assert good
    assert {row["error"] for row in rows.values()} == {"the time was over"}


@pytest.mark.parametrize(("held", "status"), [(False, "ok"), (True, "left out")])
def test_a_large_case_waits_for_others_as_long_as_there_is_time(held: bool, status: str, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as handle:
        if held:
            fcntl.flock(handle, fcntl.LOCK_EX)
        good, rows = checked(tmp_path, "pass", seconds=8.0)
    assert good
    assert (rows["it: large"]["status"], rows["it: third"]["status"]) == (status, "ok")


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_main", TOOLS / "gpu" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(main := importlib.util.module_from_spec(spec))
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    start = time.time()
    assert main._run([sys.executable, "-c", child], os.environ, tmp_path / "log", start + 1) is None
    assert time.time() - start < 10


def test_source_has_the_entry_points_of_what_is_built(tmp_path: Path) -> None:
    paths = link_source(TOOLS.parent, tmp_path / "site")
    found = {dist.metadata["Name"]: dist for dist in distributions(path=paths[:1])}
    assert found.keys() == {path.parent.name for path in TOOLS.parent.glob("packages/*/pyproject.toml")}
    (backend,) = (p for p in found["kpt-backend-nvidia"].entry_points if p.group == "kpt.backends")
    assert (backend.name, backend.value) == ("nvidia", "kpt_backend_nvidia:BACKEND")
    assert all(Path(path).is_dir() for path in paths)
