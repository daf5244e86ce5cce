"""The conformance suite on the device, a process for each kernel, and the kernel library's own tests, compiled."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kpt_backend_nvidia import BACKEND
from kpt_conformance.report import now
from kpt_core.registry import case_tables

from .machine import Machine
from .plan import say
from .progress import DEADLINE, OUTCOMES, TARGET
from .rows import Job, LeftOutError, Row, Rows, read_lines

#: pytest's exit codes where the process is sound: all passed, some failed, the time was over, nothing was left.
_ENDED = (0, 1, 2, 5)
#: Seconds that pytest has for ending in time.
_ENDING = 15.0
_TINY = "values and small and float32 or declaration"


def run(machine: Machine) -> None:
    """Write a row for each kernel, and a report of each kernel's run to `evidence/`."""
    shutil.rmtree(machine.plan.out / "evidence", ignore_errors=True)
    (machine.plan.out / "evidence").mkdir(parents=True)
    rows = Rows(machine.plan.folder)
    with ThreadPoolExecutor(max(machine.plan.jobs, 1)) as pool:
        done = [pool.submit(rows.run, [job], lambda: True) for job in _jobs(machine)]
        for each in done:
            each.result()


def _jobs(machine: Machine) -> list[Job]:
    """The kernels, that with the most cases first, and the tests of the library."""
    tables = case_tables()
    kernels = sorted(
        (kernel for kernel in BACKEND.kernels() if kernel.op in tables),
        key=lambda kernel: -len(tables[kernel.op].cases),
    )
    chosen = kernels[-2:] if machine.plan.tiny else kernels
    jobs: list[Job] = [(kernel.forward, partial(_suite, machine, kernel.forward)) for kernel in chosen]
    return [*jobs, ("tests of kpt-triton", partial(_library, machine))]


def _suite(machine: Machine, target: str) -> Row:
    options = ["--kpt-backend=nvidia", f"--kpt-device={machine.plan.device}"]
    if machine.plan.tiny:
        options += ["-k", _TINY]
    # Away from the checkout, whose settings are for the versions that it is tested with.
    settings = machine.plan.folder / "pytest.ini"
    settings.write_text("[pytest]\n")
    stem = f"{now()[:10]}-nvidia-{target.replace(':', '.')}"
    evidence = f"--kpt-report={machine.plan.out / 'evidence' / stem}.json"
    return _pytest(machine, target, [*options, "-c", str(settings)], machine.plan.folder, evidence, target)


def _library(machine: Machine) -> Row:
    folder = machine.plan.tests("packages/kpt-triton/tests")
    if folder is None:
        raise LeftOutError("there is no checkout with its tests")
    chosen = ["-k", "test_sorting and (strides or named)"] if machine.plan.tiny else []
    return _pytest(machine, "kpt-triton", [str(folder), "-W", "default", *chosen], machine.plan.checkout, "", "")


def _pytest(machine: Machine, name: str, options: list[str], folder: Path, evidence: str, target: str) -> Row:
    """Run pytest; where the device is lost, run what is left in a new process.

    Args:
        machine: the device.
        name: of what is tested, for files.
        options: of pytest.
        folder: where it runs.
        evidence: the option that asks for a report, "" for none. A run that was broken off leaves none.
        target: of the kernel whose tests are run alone, "" for all.
    """
    stem = name.replace(":", ".")
    outcomes, log = machine.plan.folder / f"{stem}.jsonl", machine.plan.folder / f"{stem}.txt"
    threads = max(1, (os.cpu_count() or 1) // max(machine.plan.jobs, 1))
    env = os.environ | {
        OUTCOMES: str(outcomes),
        TARGET: target,
        DEADLINE: str(machine.plan.deadline - _ENDING),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu.progress", *options]
    lost: list[str] = []
    while True:
        before = len(read_lines(outcomes))
        asked = [*command, f"--junitxml={outcomes.with_suffix('.xml')}", *([evidence] if evidence and not lost else [])]
        left = max(1.0, machine.plan.deadline - time.time())
        with log.open("ab") as stream:
            try:
                code = subprocess.run(
                    asked, cwd=folder, env=env, stdout=stream, stderr=stream, timeout=left, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                break
        if code in _ENDED:
            break
        found = read_lines(outcomes)
        if len(found) == before:
            raise RuntimeError(f"pytest ended with {code} before a test had run; see {log.name}")
        lost.append(found[-1]["id"])
    return _row(read_lines(outcomes), lost, log)


def _row(outcomes: list[Row], lost: list[str], log: Path) -> Row:
    """The outcomes of a kernel's tests, of which those in `lost` ended their process."""
    by_id: dict[str, Row] = {each["id"]: each for each in outcomes}
    left = outcomes[-1]["left"] if outcomes else 0
    unfinished = [name for name, each in by_id.items() if each["outcome"] == "begun" and name not in lost]
    for name in unfinished:
        del by_id[name]
    counts = Counter("lost" if name in lost else each["outcome"] for name, each in by_id.items())
    failing = [name for name, each in by_id.items() if name in lost or each["outcome"] == "failed"]
    for name in failing:
        say(f"          {name}: {by_id[name].get('message', 'its process ended')}")
    row: dict[str, Any] = {"counts": dict(counts), "failing": failing, "not_run": left, "unfinished": unfinished}
    if failing:
        row |= {"status": "failed", "error": f"{len(failing)} of {len(by_id)} tests failed; see {log.name}"}
    elif left:
        last = f", in {unfinished[0]}" if unfinished else ""
        row |= {"status": "left out", "reason": f"{left} tests were not run, the time was over{last}"}
    elif not by_id:
        row |= {"status": "failed", "error": f"no test was run; see {log.name}"}
    return row
