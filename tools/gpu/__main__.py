"""What only a GPU can prove, by one program: `python tools/gpu --help`.

It needs Python alone: torch and our packages are the business of the processes that it starts. Each has a time limit
and a log, and writes what it finds at once; what crashes or hangs stops no other.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rows import say
from running import CHECKOUT, HERE, Job, environment_with, install_wheels, link_source, run
from summary import PARTS, write_summary, write_whole

_TINY_SUITE = "(values and small and float32 or declaration)"


def main(arguments: list[str]) -> int:
    """Run the parts that are asked for; 0 if every part was complete and nothing failed."""
    options = _options(arguments)
    # So that what was started is ended with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        paths: list[str] = []
        if options.wheels is not None:
            paths = install_wheels(options.wheels, Path(temporary, "site"))
        elif options.source:
            paths = link_source(CHECKOUT, Path(temporary, "site"))
        env = environment_with(paths, options.device)
        told = subprocess.run(
            [sys.executable, HERE / "facts.py", options.device], env=env, stdout=subprocess.PIPE, text=True, check=False
        )
        if told.returncode:
            return 1
        facts: dict[str, Any] = json.loads(told.stdout) | {"commit": options.commit or _commit(), "tiny": options.tiny}
        write_whole(out / "environment.json", json.dumps(facts, indent=1) + "\n")
        for part in options.part:
            say(f"== {part} ==")
            _empty(out / part)
            jobs = _jobs(part, options, out, env, facts["kernels"])
            deadline = time.time() + 60 * options.minutes
            with ThreadPoolExecutor(options.jobs if part == "conformance" else 1) as pool:
                list(pool.map(partial(run, folder=out / part, deadline=deadline), jobs))
            good = write_summary(out)
    say(f"report: {out / 'SUMMARY.md'}")
    return 0 if good else 1


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tools/gpu", description="Prove on a GPU what can only be proven there.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, help="may be repeated; all of them, in this order, if left out")
    add("--out", type=Path, default=Path("gpu-report"), metavar="FOLDER", help="of the report (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheels", type=Path, metavar="FOLDER", help="install these wheels for the run")
    source.add_argument("--source", action="store_true", help="run the packages of this checkout as they are")
    add("--minutes", type=float, default=8.0, help="limit of each part (default: %(default)g)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu interprets the kernels; use it with --tiny")
    add("--tiny", action="store_true", help="the smallest sizes, to try this program itself")
    add("--jobs", type=int, default=0, help="processes at a time; a few on a GPU if left out, one on a CPU")
    add("--commit", default="", help="of the source, where git can't tell")
    options = parser.parse_args(arguments)
    options.part = [part for part in PARTS if part in (options.part or PARTS)]
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0")
    options.jobs = options.jobs or (1 if options.device == "cpu" else max(1, min(5, (os.cpu_count() or 2) // 2)))
    return options


def _commit() -> str:
    asked = ["git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _empty(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.is_file():
            old.unlink()


def _jobs(part: str, options: argparse.Namespace, out: Path, env: dict[str, str], kernels: list[str]) -> list[Job]:
    """Return the processes of a part."""
    folder = out / part
    worker = [str(out), options.device, *(["--tiny"] if options.tiny else [])]
    bench = [str(CHECKOUT / "benchmarks" / "bench.py"), "--device", "cuda", "--seconds", "1.5"]
    bench += ["--interpret"] if options.device == "cpu" else []
    bench += ["--quick"] if options.tiny else []
    if part == "smoke":
        return [Job("log", [str(HERE / "smoke.py"), *worker], env, rows=True)]
    if part == "bench":
        # As they are shipped: this machine's own tuning is left out.
        shipped = env | {"KPT_TUNING": str(folder / "no tables")}
        groups = ("decode", "prefill", "graph", "step")
        return [Job(g, [*bench, "--group", g, "--output", str(folder / f"{g}.json")], shipped) for g in groups]
    if part == "tune":
        shutil.rmtree(out / "tuning", ignore_errors=True)
        # Tables of this machine's user would decide what runs untuned.
        own = env | {"KPT_TUNING": str(out / "tuning")}
        first = ["tiny decode"] if options.tiny else ["Qwen3-30B", "Mixtral", "32x128", "OLMoE"]
        chosen = [each for text in first for each in ("--only", text)]
        share = ["--minutes", str(0.7 * options.minutes), "--jobs", str(options.jobs)]
        tuning = Job("log", [str(HERE / "tune.py"), *worker, *share], own, rows=True)
        return [tuning, Job("bench", [*bench, *chosen, "--output", str(folder / "bench.json")], own)]
    shutil.rmtree(out / "evidence", ignore_errors=True)
    (out / "evidence").mkdir()
    # Away from the checkout, whose settings are for the versions that it is tested with.
    (folder / "pytest.ini").write_text("[pytest]\n")
    threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    env = env | {"KPT_GPU_LOCK": str(folder / ".lock"), "OMP_NUM_THREADS": threads}
    pytest = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "large_cases", "-o", "faulthandler_timeout=240"]
    today = datetime.now(UTC).date().isoformat()
    jobs = []
    for kernel in kernels[-2:] if options.tiny else kernels:
        name = kernel.replace(":", ".")
        asked = ["--kpt-backend=nvidia", f"--kpt-device={options.device}", "-c", str(folder / "pytest.ini")]
        asked += ["-k", f"{_TINY_SUITE} and {kernel}" if options.tiny else kernel]
        asked += [f"--junitxml={folder / name}.xml", f"--kpt-report={out / 'evidence'}/{today}-nvidia-{name}.json"]
        jobs.append(Job(name, [*pytest, *asked], env, folder))
    tests = CHECKOUT / "packages" / "kpt-triton" / "tests"
    if tests.exists():
        some = ["-k", "test_sorting and (strides or named)"] if options.tiny else []
        asked = [str(tests), "-W", "default", *some, f"--junitxml={folder / 'kpt-triton.xml'}"]
        jobs.append(Job("kpt-triton", [*pytest, *asked], env))
    return jobs


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
