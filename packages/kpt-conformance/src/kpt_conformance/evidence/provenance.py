"""With what something was proven: the chip, what ran beside Python, the versions."""

import platform
import re
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch

import kpt_core
from kpt_core.evidence import Claim
from kpt_core.tuning import device_name

#: What stands for the chip where Triton's interpreter took its place.
INTERPRETER = "Triton's interpreter"
#: Features of a CPU that change which kernels run, as they begin or end in torch's names for instruction sets.
_CPU_FEATURES = ("amx", "bf16", "fp16")
#: How a CPU's name ends: with torch's capability and the features above, or a library's instruction set.
_OF_A_CPU = re.compile(r"\((default|no avx|baseline|avx|amx|neon|sve|vsx|zvector|z)\w*(, \w+)*\)$")


def chip_name(device: torch.device, isa: str | None = None) -> str:
    """The name of a device, the same on every machine that has one: `NVIDIA H200`, `AMD EPYC 9R14 (avx512, bf16)`.

    Args:
        device: whose name is asked for.
        isa: the instruction set that ran, which then stands in place of all that a CPU has: `Intel Xeon (avx2)`.
    """
    if device.type == "cpu":
        return _cpu_name(isa)
    return " ".join(device_name(device).split())


def is_cpu(chip: str) -> bool:
    """Whether a name is one that `chip_name` gives to CPUs."""
    return _OF_A_CPU.search(chip) is not None


def made_with_triton(claim: Claim) -> bool:
    """Whether a kernel imports Triton."""
    return "triton" in claim.sources().third_parties


def ran_with(claim: Claim) -> dict[str, str]:
    """What runs beside Python when a kernel runs here, as far as that is known beforehand.

    Raises:
        KptError: a native library is not the one that its build wrote down.
    """
    backend = kpt_core.backends().get(claim.backend)
    found = dict(backend.library()) if backend is not None else {}
    if made_with_triton(claim):
        return found | {"triton": version("triton")}
    return found or {"torch": torch.__version__.partition("+")[0]}


def versions() -> dict[str, str]:
    """Versions of Python, torch, its toolkit, Triton and every package of KPT."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for toolkit in ("cuda", "hip", "xpu"):
        of_toolkit = getattr(torch.version, toolkit, None)
        if of_toolkit:
            found[toolkit] = str(of_toolkit)
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(("kpt-", "triton")):
            found.setdefault(name, distribution.version)
    return found


def _cpu_name(isa: str | None) -> str:
    tell = getattr(torch.cpu, "get_capabilities", None)  # torch >= 2.11
    capabilities: Mapping[str, Any] = tell() if tell is not None else {}
    name = capabilities.get("cpu_name") or _name_in_proc() or platform.machine() or "CPU"
    there = [key.split("_") for key, value in capabilities.items() if value is True]
    features = [feature for feature in _CPU_FEATURES if any(feature in words for words in there)]
    has = isa or ", ".join([torch.backends.cpu.get_cpu_capability().lower(), *features])
    return f"{' '.join(str(name).split())} ({has})"


def _name_in_proc() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == "model name" and value.strip()), None)
