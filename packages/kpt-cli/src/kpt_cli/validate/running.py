"""Running the steps of a platform report: commands that exist, each with a limit, a log, an exit code and its time."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .privacy import folders, hider
from .reading import DOCTOR, FORMAT, HARDWARE, MANIFEST, STEPS, SUMMARY, ending, hardware_of, manifest, summary

SUITES = ("quick", "full")
BENCHES = {"bench-moe": None, "bench-attention": "kpt_attention", "bench-fp8": "kpt_fp8"}  #: with what they need
#: Options of the suite. Two trials of each check on each kernel, in the same order in every run.
_OPTIONS = {"quick": ("--kpt-quick", "--kpt-quick-trials=2", "--kpt-quick-seconds=100"), "full": ()}
_LIMITS = {"quick": 600.0, "full": 4 * 3600.0}  #: seconds of a suite
_LIMIT = 900.0  #: seconds of any other step
_MOST_PROCESSES = 8  #: of a suite: each has torch, and a context of the GPU
_GRACE = 5.0  #: seconds between asking a step to end and ending it

Tell = Callable[[str], None]  #: shows a line


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what it leaves: `stdout` names the file of its output, which else goes to the log."""

    name: str
    command: tuple[str, ...]
    limit: float
    files: tuple[str, ...] = ()
    stdout: str | None = None

    def planned(self) -> dict[str, Any]:
        """Return its entry in `steps.json` before it ran."""
        about = {"name": self.name, "command": shlex.join(self.command), "limit": self.limit}
        left = [*self.files, *([self.stdout] if self.stdout else [])]
        about |= {"log": f"logs/{self.name}.txt", "files": left}
        return about | {"ended": None, "exit_code": None, "seconds": None}


def doctor_step() -> Step:
    """Return the step that comes first: what it finds decides on the others."""
    return Step("doctor", ("kpt", "doctor", "--json"), _LIMIT, stdout=DOCTOR)


def step_names() -> list[str]:
    """Return all names of steps that can be asked for, without torch."""
    backends = sorted({entry.name for entry in entry_points(group="kpt.backends")} | {"torch"})
    return [*(f"suite-{name}" for name in backends), *BENCHES, "demo"]


def steps_for(doctor: Mapping[str, Any], suite: str, only: Sequence[str]) -> tuple[list[Step], dict[str, str]]:
    """Return the steps for a machine, and why others are left out, by name.

    Args:
        doctor: what `kpt doctor --json` found.
        suite: how much of the conformance suite and of the benchmarks: one of `SUITES`.
        only: names of the steps that are wanted; empty for all.
    """
    steps, left_out = [], {}
    for backend in doctor["backends"]:
        reason = backend["unavailable"] or next(iter(backend["broken"]), None)
        if reason is None and not backend["capabilities"]:
            reason = f"no device for it is here: {', '.join(backend['device_types']) or 'any'}"
        name = f"suite-{backend['name']}"
        if reason is not None:
            left_out[name] = reason
        else:
            steps.append(_suite(name, backend["name"], suite))
    for name, package in BENCHES.items():
        if package is not None and find_spec(package) is None:
            left_out[name] = f"{package.replace('_', '-')} is not installed"
        else:
            command = ["kpt", "bench", name.removeprefix("bench-"), *(["--quick"] * (suite == "quick")), "--json"]
            steps.append(Step(name, tuple(command), _LIMIT, stdout=f"{name}.json"))
    steps.append(Step("demo", ("kpt", "demo", "--quick", "--json", "-o", "demo"), _LIMIT, stdout="demo.json"))
    wanted = [step for step in steps if not only or step.name in only]
    return wanted, {name: why for name, why in left_out.items() if not only or name in only}


def _suite(name: str, backend: str, suite: str) -> Step:
    report, junit = f"report-{backend}.json", f"junit-{backend}.xml"
    command = ["pytest", f"--kpt-backend={backend}", *_OPTIONS[suite], "-q", "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(_MOST_PROCESSES, os.cpu_count() or 1)))]
    command += [f"--kpt-report={report}", f"--junitxml={junit}"]
    return Step(name, tuple(command), _LIMITS[suite], files=(report, junit))


class Run:
    """A report that is being written: `steps.json` says at any time what ended.

    Args:
        folder: new or empty.
        limit: seconds of each step, instead of its own.
        tell: shows a line for each step.
        about: entries of `steps.json`.
    """

    def __init__(self, folder: Path, limit: float | None, tell: Tell, **about: Any) -> None:
        self.folder, self.limit, self.tell = folder, limit, tell
        start = datetime.now(UTC).isoformat(timespec="seconds")
        self.document: dict[str, Any] = {"format": FORMAT, **about, "start": start, "left_out": {}, "steps": []}
        (folder / "logs").mkdir(parents=True)
        self._write()

    def _write(self) -> None:
        from kpt_core.files import write_whole

        write_whole(self.folder / STEPS, json.dumps(self.document, indent=1) + "\n")

    def run(self, steps: Sequence[Step]) -> None:
        """Run steps, one after the other; one that fails does not keep the next from running."""
        planned = [step.planned() | ({} if self.limit is None else {"limit": self.limit}) for step in steps]
        self.document["steps"] += planned
        self._write()
        with _interrupted_by_sigterm(), tempfile.TemporaryDirectory(prefix="kpt-validate-") as work:
            hide = hider(folders(Path(work)))
            for step, entry in zip(steps, planned, strict=True):
                self.tell(f"{step.name}: {entry['command']}")
                try:
                    entry |= self._run(step, entry, Path(work, step.name), hide)
                except KeyboardInterrupt:
                    entry["ended"] = "interrupted"
                    raise
                finally:
                    self._write()
                self.tell(f"{step.name}: {ending(entry)}")

    def _run(self, step: Step, entry: Mapping[str, Any], work: Path, hide: Callable[[bytes], bytes]) -> dict[str, Any]:
        """Run a step in a folder of its own, and take over what it leaves there."""
        work.mkdir()
        log = self.folder / entry["log"]
        start = time.monotonic()
        with log.open("w", encoding="utf-8") as stream:
            stream.write(f"$ {entry['command']}\n")
            stream.flush()
            with (work / (step.stdout or "stdout")).open("wb") as output:
                target = output if step.stdout else stream
                code = _call(_argv(step.command), work, target, stream, entry["limit"])
        found: dict[str, Any] = {"ended": "limit" if code is None else "exited", "exit_code": code}
        found["seconds"] = round(time.monotonic() - start, 1)
        text = hide(log.read_bytes())
        newline = b"" if text.endswith(b"\n") else b"\n"
        log.write_bytes(text + newline + f"{ending({**entry, **found})}\n".encode())
        for name in entry["files"]:
            if (work / name).is_file():
                if name.endswith(".xml"):
                    _slim(work / name)
                (self.folder / name).write_bytes(hide((work / name).read_bytes()))
        return found

    def read_machine(self) -> dict[str, Any]:
        """Return what `doctor` found, after writing `hardware.json`; `ValueError` if it found nothing."""
        from kpt_core.files import write_whole

        doctor: dict[str, Any] = json.loads((self.folder / DOCTOR).read_text(encoding="utf-8"))
        hardware = hardware_of(doctor, os.cpu_count() or 1)
        write_whole(self.folder / HARDWARE, json.dumps(hardware, indent=1) + "\n")
        return doctor

    def seal(self) -> bool:
        """Write the summary, then the manifest; return whether every step ended with 0."""
        from kpt_core.files import write_whole

        self._write()
        write_whole(self.folder / SUMMARY, summary(self.folder))
        write_whole(self.folder / MANIFEST, manifest(self.folder))
        return all(step["exit_code"] == 0 for step in self.document["steps"])


def _argv(command: Sequence[str]) -> list[str]:
    modules = {"kpt": "kpt_cli", "pytest": "pytest"}
    program, *arguments = command
    # This environment's, whatever PATH finds first.
    return [sys.executable, "-m", modules[program], *arguments] if program in modules else [*command]


def _call(argv: Sequence[str], work: Path, stdout: Any, stderr: Any, limit: float) -> int | None:
    """Run a command until it ends, and return its exit code; None if its time was over."""
    process = subprocess.Popen(
        argv, cwd=work, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command with all that it started, if it still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C while the block runs: steps are in sessions of their own, and would go on."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _slim(file: Path) -> None:
    """Leave out of pytest's XML what its report counts, what all tests share, and where files lie on this machine."""
    tree = ElementTree.parse(file)
    for case in tree.iter("testcase"):
        case.attrib = {key: value for key, value in case.attrib.items() if key == "name"}
        for properties in case.findall("properties"):
            case.remove(properties)
        for skipped in case.findall("skipped"):
            skipped.text = None  # file, line and message again
            skipped.attrib.pop("type", None)
    for suite in tree.iter("testsuite"):
        suite.attrib.pop("hostname", None)
    ElementTree.indent(tree, "")
    tree.write(file, encoding="utf-8", xml_declaration=True)
