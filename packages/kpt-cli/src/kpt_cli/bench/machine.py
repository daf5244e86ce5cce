"""Where and with what something was measured."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kpt_cli.plugins import packages


def machine() -> dict[str, Any]:
    """The processor, the threads, the versions, the commit and the day."""
    from transformers import __version__ as transformers_version

    return {
        "processor": _processor(),
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


def _processor() -> str:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    return next((value.strip() for key, value in fields.items() if key.strip() == "model name"), platform.processor())


def _commit() -> str | None:
    """The commit of this source, with `+changes` if files differ from it; None if git does not know the source."""
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
