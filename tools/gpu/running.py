"""Running a process of a part in its time, and making our packages importable where they are not installed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rows import read_rows, say

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
#: Seconds that a process has for ending, after it was interrupted.
_GRACE = 20.0


@dataclass(frozen=True, slots=True)
class Job:
    """A process of a part.

    Attributes:
        name: of its log.
        command: for this interpreter.
        env: variables.
        folder: where it runs.
        rows: it writes rows, so that another process can go on where one dies.
    """

    name: str
    command: list[str]
    env: Mapping[str, str]
    folder: Path = CHECKOUT
    rows: bool = False


def run(job: Job, folder: Path, deadline: float) -> None:
    """Run a job, anew where a row ended its process, and write how it ended to `jobs.jsonl`.

    Args:
        job: what is run.
        folder: of its part.
        deadline: seconds since the epoch at which it is interrupted.
    """
    log, rows, start = folder / f"{job.name}.txt", folder / "rows.jsonl", time.time()
    while True:
        before = len(read_rows(rows))
        code = _watch(job, log, deadline)
        if not (job.rows and code and time.time() < deadline and len(read_rows(rows)) > before):
            break
    left_out = code == 5 and "pytest" in job.command  # no test was chosen
    found: dict[str, Any] = {"name": job.name, "status": "ok" if code == 0 else "left out" if left_out else "failed"}
    if code != 0:
        ending = "stopped, its time was over" if code is None else f"its process ended with {code}"
        found["error"] = f"{ending}; see {folder.name}/{log.name}"
    found["seconds"] = round(time.time() - start, 1)
    with (folder / "jobs.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(found) + "\n")
    say(f"== {folder.name}, {job.name}: {found.get('error', 'complete')} ==")


def _watch(job: Job, log: Path, deadline: float) -> int | None:
    """Run a process to its end; None if it had to be stopped, by an interrupt first, upon which pytest reports."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, *job.command],
            env=job.env,
            cwd=job.folder,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        return process.wait(max(1.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started ends with it
        process.wait()


def install_wheels(wheels: Path, target: Path) -> list[str]:
    """Install all wheels of a folder into another one; no index is asked.

    Raises:
        SystemExit: there are no wheels, or pip fails.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"--wheels {wheels}: no wheel is there; `nox -s wheels` builds them")
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", target)
    if subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=False).returncode:
        raise SystemExit(f"--wheels {wheels}: pip did not install them")
    return [str(target)]


def link_source(checkout: Path, target: Path) -> list[str]:
    """Return folders that make the packages of a checkout importable, their entry points included.

    Entry points are read from metadata that a build makes. Here it is written from each `pyproject.toml`, since nothing
    that builds is needed then.
    """
    paths = [str(target)]
    for file in sorted(checkout.glob("packages/*/pyproject.toml")):
        project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
        module = project["name"].replace("-", "_")
        source = file.parent / "src"
        version = re.search(r'^__version__ = "(.+)"$', (source / module / "__init__.py").read_text(), re.M)
        if version is None:
            raise SystemExit(f"{source / module}/__init__.py has no line `__version__ = ...`")
        folder = target / f"{module}-{version[1]}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version[1]}\n")
        groups: dict[str, dict[str, str]] = project.get("entry-points", {})
        lines = [line for group, points in groups.items() for line in (f"[{group}]", *map(" = ".join, points.items()))]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
        paths.append(str(source))
    return paths


def environment_with(paths: list[str], device: str) -> dict[str, str]:
    """Return variables: our packages, no choice of kernels from outside, and no look at a model hub."""
    env = {name: value for name, value in os.environ.items() if name not in ("KPT_USE", "KPT_DISABLE", "KPT_STRICT")}
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    ours = (str(HERE), str(CHECKOUT / "benchmarks"))
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *ours, *inherited]))
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
        if any(Path(paths[0]).glob("kpt_backend_cpu*")) if paths else find_spec("kpt_backend_cpu") is not None:
            # Its kernels are for this device, and would serve the calls that are tried here.
            env["KPT_DISABLE"] = "cpu"
    return env
