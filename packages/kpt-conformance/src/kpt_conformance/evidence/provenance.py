"""Where and with what something was proven: the chip, the versions, the commit."""

import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from kpt_core.tuning import device_name

#: Features of a CPU that change which kernels run, as they begin or end in torch's names for instruction sets.
_CPU_FEATURES = ("amx", "bf16", "fp16")


def chip_name(device: torch.device) -> str:
    """The name of a device, the same on every machine that has one: `NVIDIA H200`, `AMD EPYC 9R14 (avx512, bf16)`."""
    if device.type == "cpu":
        return _cpu_name()
    return " ".join(device_name(device).split())


def _cpu_name() -> str:
    tell = getattr(torch.cpu, "get_capabilities", None)  # torch >= 2.11
    capabilities: Mapping[str, Any] = tell() if tell is not None else {}
    name = capabilities.get("cpu_name") or _name_in_proc() or platform.machine() or "CPU"
    there = [key.split("_") for key, value in capabilities.items() if value is True]
    features = [feature for feature in _CPU_FEATURES if any(feature in words for words in there)]
    return f"{' '.join(str(name).split())} ({', '.join([torch.backends.cpu.get_cpu_capability().lower(), *features])})"


def _name_in_proc() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == "model name" and value.strip()), None)


def versions() -> dict[str, str]:
    """Versions of Python, torch, its toolkit, Triton and every package of KPT."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for toolkit in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, toolkit, None)
        if version:
            found[toolkit] = str(version)
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(("kpt-", "triton")):
            found.setdefault(name, distribution.version)
    return found


def commit_of(files: Iterable[Path]) -> str | None:
    """The commit that files are of, with `+changes` if they differ from it; None outside a git work tree.

    Only these files are looked at: that a record was written a moment ago does not make the next one's commit dirty.
    """
    by_folder = sorted({file.resolve() for file in files})
    folder = by_folder[0].parent
    names = [str(file) for file in by_folder]
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head is None or _git(folder, "check-ignore", *names) is not None:
        return None
    changes = _git(folder, "status", "--porcelain", "--", *names)
    return None if changes is None else f"{head}+changes" if changes else head


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None if it says no."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
