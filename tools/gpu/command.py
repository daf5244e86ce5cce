"""The command line. It needs Python alone: torch and our packages are the workers' business."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .installing import environment_with, install_wheels, link_source
from .plan import PARTS, Plan, say, write_whole
from .summary import write_summary
from .supervising import supervise

_CHECKOUT = Path(__file__).resolve().parents[2]
_MINUTES = 8.0


def run(arguments: list[str]) -> int:
    """Run the parts that are asked for, each in a process of its own.

    Returns:
        0 if every part was complete and nothing failed, else 1.
    """
    if arguments[:1] == ["--worker"]:
        return _work(arguments[1])
    options = _options(arguments)
    # So that a worker, which has a session of its own, is ended with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        paths: list[str] = []
        if options.wheels is not None:
            paths = install_wheels(options.wheels, Path(temporary, "site"))
        elif options.source:
            paths = link_source(_CHECKOUT, Path(temporary, "site"))
        env = environment_with(paths, options.device)
        good = True
        for part in options.part:
            plan = Plan(
                part=part,
                out=out,
                device=options.device,
                tiny=options.tiny,
                jobs=options.jobs,
                commit=options.commit or _commit(),
                deadline=time.time() + 60 * options.minutes,
                checkout=_CHECKOUT,
            )
            good = _run_part(plan, env) and good
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
    add("--minutes", type=float, default=_MINUTES, help="limit of each part (default: %(default)g)")
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


def _run_part(plan: Plan, env: dict[str, str]) -> bool:
    for old in plan.folder.glob("*") if plan.folder.is_dir() else ():
        if old.is_file():
            old.unlink()
    plan.folder.mkdir(parents=True, exist_ok=True)
    start = time.time()
    say(f"== {plan.part} ==")
    given = json.dumps(asdict(plan), default=str)
    ending = supervise([sys.executable, str(Path(__file__).parent), "--worker", given], env, plan)
    state = {"part": plan.part, "ending": ending, "minutes": round((time.time() - start) / 60, 2)}
    write_whole(plan.folder / "state.json", json.dumps(state))
    good = write_summary(plan.out)
    say(f"== {plan.part}: {ending} ==")
    return good


def _work(given: str) -> int:
    from .worker import work

    fields: dict[str, Any] = json.loads(given)
    return work(Plan(**fields | {name: Path(fields[name]) for name in ("out", "checkout")}))


def _commit() -> str:
    try:
        asked = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
