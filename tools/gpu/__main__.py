"""What only a GPU can prove, in a quarter of an hour: `python tools/gpu prove`, then `python tools/gpu suite`.

It needs Python alone: torch and our packages are the business of pytest's processes, which `rows.py` has write down
what each check found as soon as it ended, and which end in time.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from packages import CHECKOUT, HERE, environment_with, install_wheels, link_source
from summary import write_summary, write_whole

#: What torch calls the devices of each backend.
DEVICES = {"nvidia": "cuda", "amd": "cuda", "xpu": "xpu"}
#: Minutes of each command.
COMMANDS = {"prove": 8.5, "suite": 3.0, "tune": 8.0}
_HELP = """prove: each kernel's numbers, its programs' times, A and B, what users call, and KPT beside its peers;
suite: the conformance suite on a few trials of each check, all small cases of its values, and kpt-triton's tests;
tune: tune the kernels for this device, for a table to ship."""
#: Products by blocks are the vendor's library's, which is not here.
_TINY_SUITE = "((values and small and float32) or declaration) and not gpu_scaled_mm_blocks"
#: Seconds beyond its time until a process is ended: a hung test has ended itself before.
_GRACE = 30.0


def main(arguments: list[str]) -> int:
    """Run a command; 0 if all of it ran and nothing failed."""
    options = _options(arguments)
    deadline = time.time() + 60 * options.minutes - 5
    # So that what was started is ended with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out: Path = options.out.resolve()
    folder = out / options.command
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (out / "evidence").mkdir(exist_ok=True)
    device = "cpu" if options.dry_run else DEVICES[options.backend]
    with tempfile.TemporaryDirectory() as temporary:
        paths: list[str] = []
        if options.wheels is not None:
            paths = install_wheels(options.wheels, Path(temporary, "site"))
        elif options.source:
            paths = link_source(CHECKOUT, Path(temporary, "site"))
        env = environment_with(paths, device) | {"KPT_GPU_LOCK": str(Path(temporary, "lock"))}
        told = subprocess.run(
            [sys.executable, HERE / "facts.py", options.backend, device], env=env, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        if told.returncode:
            return 1
        facts = json.loads(told.stdout) | {"commit": options.commit or _commit(), "tiny": options.dry_run}
        write_whole(out / "environment.json", json.dumps(facts, indent=1) + "\n")
        for name, asked, share, jobs in _phases(options, device, out):
            start = time.time()
            end = start + (deadline - start) * share
            given = ["--gpu-out", str(folder), "--gpu-device", device, "--gpu-deadline", str(end)]
            given += ["--gpu-tiny"] if options.dry_run else []
            command = [sys.executable, "-m", "pytest", "-n", str(jobs), *asked, *given]
            code = _run(command, env, folder / f"{name}.txt", end + _GRACE)
            ending = {0: "ok", 1: "failed", 5: "left out", None: "stopped, its time was over"}
            with (folder / "phases.jsonl").open("a", encoding="utf-8") as stream:
                status = ending.get(code, f"its process ended with {code}")
                stream.write(json.dumps({"name": name, "status": status, "seconds": round(time.time() - start)}) + "\n")
            good = write_summary(out)
            sys.stdout.write(f"== {options.command}, {name}: {status} ==\n")
            sys.stdout.flush()
    sys.stdout.write(f"report: {out / 'SUMMARY.md'}\n")
    return 0 if good else 1


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tools/gpu", description="Prove on a GPU what can only be proven there.", allow_abbrev=False
    )
    add = parser.add_argument
    add("command", choices=COMMANDS, help=_HELP)
    add("--out", type=Path, default=Path("gpu-report"), metavar="FOLDER", help="of the report (default: %(default)s)")
    add("--backend", choices=DEVICES, default="nvidia", help="whose GPU; prove and tune are for nvidia alone")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheels", type=Path, metavar="FOLDER", help="install these wheels for the run")
    source.add_argument("--source", action="store_true", help="run the packages of this checkout as they are")
    add("--minutes", type=float, help=f"limit; if left out {', '.join(f'{m:g} of {n}' for n, m in COMMANDS.items())}")
    add("--dry-run", action="store_true", help="on the CPU, interpreted, with the smallest sizes: tries this program")
    add("--jobs", type=int, help="processes at a time where no time is measured; at most eight if left out")
    add("--commit", default="", help="of the source, where git can't tell")
    options = parser.parse_args(arguments)
    options.minutes = COMMANDS[options.command] if options.minutes is None else options.minutes
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0")
    if options.backend != "nvidia" and options.command != "suite":
        parser.error(f"{options.command} is for nvidia alone; got --backend {options.backend}: run suite")
    cores = os.cpu_count() or 2
    options.jobs = options.jobs or (min(2, cores) if options.dry_run else max(1, min(8, cores // 2)))
    return options


def _commit() -> str:
    asked = ["git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _phases(options: argparse.Namespace, device: str, out: Path) -> list[tuple[str, list[str], float, int]]:
    """Return name, pytest's arguments, share of the time that is left, and processes of each phase."""
    ours = ["-c", str(HERE / "pytest.ini"), "-p", "large_cases", "--dist", "worksteal"]

    def checks(*names: str) -> list[str]:
        return [*ours, "-p", "checking", *(str(HERE / f"check_{name}.py") for name in names)]

    if options.command == "prove":
        measured = checks("times", "choices", "uses", "peers")
        return [("numbers", checks("numbers"), 0.35, options.jobs), ("figures", measured, 1.0, 1)]
    if options.command == "tune":
        shutil.rmtree(out / "tuning", ignore_errors=True)
        tuning = checks("tuning")
        return [
            ("compiling", [*tuning, "-k", "compiles"], 0.3, options.jobs),
            ("tuning", [*tuning, "-k", "tunes"], 1, 1),
        ]
    today, phases = datetime.now(UTC).date().isoformat(), []
    for backend, kernels, share in ((options.backend, "", 0.6), ("torch", "gpu_", 0.7)):
        asked = [*ours, "--kpt-backend", backend, "--kpt-device", device]
        asked += ["--kpt-quick", "--kpt-quick-values", "--kpt-quick-seconds", str(share * 60 * options.minutes)]
        asked += ["--kpt-quick-trials", "1" if options.dry_run else "4"]
        dtypes = _TINY_SUITE if options.dry_run else "bfloat16 or declaration"
        asked += ["-k", f"({dtypes}) and {kernels}" if kernels else dtypes]
        asked += ["--kpt-report", str(out / "evidence" / f"{today}-{backend}-{device}.json")]
        phases.append((backend, asked, share, options.jobs))
    tests = CHECKOUT / "packages/kpt-triton/tests"
    if tests.exists():
        some = ["-k", "test_sorting and (strides or named)"] if options.dry_run else []
        phases.append(("kpt-triton", [*ours, str(tests), *some], 1.0, options.jobs))
    return phases


def _run(command: list[str], env: Mapping[str, str], log: Path, end: float) -> int | None:
    """Run a process and what it starts to its end; None if it had to be ended."""
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=env, cwd=CHECKOUT, stdout=stream, stderr=stream, start_new_session=True)
    try:
        return process.wait(max(1.0, end - time.time()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that were left behind
        process.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
