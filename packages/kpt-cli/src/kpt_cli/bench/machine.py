"""What is measured on, and how: the machine and its versions, the memory of this process, KPT without its vendors."""

import gc
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

import kpt_core
from kpt_cli.plugins import packages
from kpt_core.contract import TORCH
from kpt_core.dispatch.settings import effective, scoped
from kpt_optimize.tuning.tables import processor

_STATUS = Path("/proc/self/status")


def machine() -> dict[str, Any]:
    """Return the processor, the threads, the versions, the commit and the day."""
    from transformers import __version__ as transformers_version

    return {
        "processor": processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "packages": {package.name: package.version for package in packages()},
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _commit() -> str | None:
    """Return the commit of this source, with `+changes` if files differ from it; None if git does not know it."""
    # A package in an environment inside a work tree is not that tree's: git ignores it, or does not track it.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes")


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def memory_growth(run: Callable[[], object]) -> int:
    """Call a function, and return by how many bytes resident memory grows meanwhile at most."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, where the system allows it
    before = psutil.Process().memory_info().rss
    run()
    return _peak() - before


def _peak() -> int:
    if _STATUS.exists():  # not ru_maxrss, which can't begin anew
        return next(
            int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")
        )
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Have kernels in plain PyTorch serve the ops inside the block, or their references where there is none."""
    scope = effective()
    vendors = kpt_core.backends().keys() - {TORCH}
    with scoped(replace(scope, disabled=scope.disabled | vendors)):
        yield
