"""Running a part's worker: it ends in time, and where it dies the next one goes on with what is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .plan import DEVICE_LOST, Plan
from .rows import Rows

#: So long may one row take, in seconds.
PATIENCE = 240.0
#: What a worker that keeps time itself may take beyond its deadline.
_GRACE = 20.0


def supervise(command: list[str], env: Mapping[str, str], plan: Plan) -> str:
    """Run a worker, and another one whenever it dies of a row.

    Returns:
        How the part ended, as a clause.
    """
    while True:
        before = len(Rows(plan.folder).rows)
        code = _watch(command, env, plan)
        rows = Rows(plan.folder)
        if code == 0:
            return "complete"
        culprit = rows.under_way
        if culprit is not None:
            ending = {None: "the part's time was over", PATIENCE_LOST: f"no end after {PATIENCE:.0f} s"}
            rows.add(culprit, "lost", error=ending.get(code, f"the process ended with {code}"))
        if code is None:
            return "stopped, its time was over"
        if len(rows.rows) == before and code != DEVICE_LOST:
            return f"broken off, its process ended with {code}; see {plan.part}/log.txt"
        if time.time() > plan.deadline:
            return "stopped, its time was over"


#: Stands for the exit code of a worker that was stopped because a row took too long.
PATIENCE_LOST = -1000


def _watch(command: list[str], env: Mapping[str, str], plan: Plan) -> int | None:
    """The worker's exit code; None if the part's time is over. What it prints is shown and kept."""
    log = plan.folder / "log.txt"
    shown = log.stat().st_size if log.exists() else 0
    begun = plan.folder / "begun.json"
    started = time.time()
    with log.open("ab") as stream:
        worker = subprocess.Popen(command, env=env, stdout=stream, stderr=stream, start_new_session=True)
    try:
        while True:
            code = worker.poll()
            shown = _show(log, shown)
            if code is not None:
                return code
            now = time.time()
            if now > plan.deadline + _GRACE:
                return None
            active = max(started, begun.stat().st_mtime if begun.exists() else started)
            if plan.part != "conformance" and now - active > PATIENCE:
                return PATIENCE_LOST
            time.sleep(0.2)
    finally:
        _end(worker)
        _show(log, shown)


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """End the worker's own process group: what it started ends with it."""
    if worker.poll() is None or _group_lives(worker.pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _show(log: Path, shown: int) -> int:
    with log.open("rb") as stream:
        stream.seek(shown)
        text = stream.read()
    if text:
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
    return shown + len(text)
