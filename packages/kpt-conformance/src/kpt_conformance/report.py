"""Reports of runs: `--kpt-report FILE` writes what a run of the suite showed of each kernel, as one JSON file.

A report says what was run, when, from which commit, on what, and how the checks of each kernel ended in each dtype. It
is evidence of that run alone: nothing outdates it but a newer one. Those worth keeping lie in `evidence/` at the root
of the repository, and docs/support.md is made from them (`kpt_conformance.support`).
"""

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kpt_core import InputError
from kpt_core.files import write_whole

FORMAT = "kpt-report-1"
#: Instead of a dtype where there is none: what a kernel declares, and wrong input.
DECLARED = "declared"
#: What a run can show of a kernel, the least first. `claimed` needs no report.
LEVELS = ("claimed", "compiled", "interpreted", "ran")
_CPU_FEATURES = ("amx", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run.

    Attributes:
        date: in UTC, as `2026-11-21T09:30:00Z`.
        commit: as `git describe --always --dirty` names it; None outside of a repository.
        level: `ran`, `interpreted` (by Triton's interpreter, on a CPU) or `compiled`.
        chip: the device's own name; empty where kernels were compiled, whose columns are chips.
        device: torch's type of the device.
        selection: `all`, or the options that left something out.
        versions: of Python, torch, Triton, compilers; the instruction set of a native library.
        kernels: `OP FUNCTION` -> dtype (`all` where dtypes were not told apart), or the chip that was compiled for ->
            numbers of checks, or configurations, that `passed`, were `refused`, `skipped` or `failed`; `absent` lists
            the checks of which none passed.
    """

    date: str
    commit: str | None
    backend: str
    level: str
    chip: str
    device: str
    selection: str
    versions: Mapping[str, str]
    kernels: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def dumps(self) -> str:
        """Return the report as JSON, a line for each kernel and dtype."""
        document = {"format": FORMAT, **asdict(self)}
        kernels = document.pop("kernels")
        head = json.dumps(document, indent=1, ensure_ascii=False).removesuffix("\n}")
        parts = []
        for kernel, columns in kernels.items():
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(counts)}" for name, counts in columns.items())
            parts.append(f"  {json.dumps(kernel)}: {{\n{lines}\n  }}")
        return f'{head},\n "kernels": {{\n' + ",\n".join(parts) + "\n }\n}\n"


def read(file: Path) -> Report:
    """Read a report, or raise `InputError` if the file is none."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.pop("format") != FORMAT or document["level"] not in LEVELS[1:]:
            raise ValueError(f"its format is not {FORMAT}")
        report = Report(**document)
        every = [counts for columns in report.kernels.values() for counts in columns.values()]
        if not all(isinstance(counts[name], int) for counts in every for name in ("passed", "refused", "failed")):
            raise ValueError("a count is no number")
        datetime.fromisoformat(report.date)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{file} is no report of a run ({type(error).__name__}: {error}): write it anew") from None
    return report


def _commit_of(folder: Path) -> str | None:
    """Return the commit that a folder has checked out, with `-dirty` where files differ from it; None without git."""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--match="]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, its toolkit and Triton."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for toolkit in ("cuda", "hip", "xpu"):
        of_toolkit = getattr(torch.version, toolkit, None)
        if of_toolkit:
            found[toolkit] = str(of_toolkit)
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith("triton"):
            found.setdefault(name, distribution.version)
    return found


def chip_name(device: Any, instruction_set: str | None = None) -> str:
    """Return a device's name, the same on every machine that has one: `NVIDIA H200`, `AMD EPYC 9R14 (avx512, bf16)`.

    An instruction set that ran on a CPU stands in place of all that it has: `Intel Xeon (avx2)`.
    """
    import torch

    from kpt_core.registry import backend_of

    if device.type != "cpu":
        return " ".join(backend_of(device).device_name(device).split())
    tell = getattr(torch.cpu, "get_capabilities", None)  # torch >= 2.11
    capabilities: Mapping[str, Any] = tell() if tell is not None else {}
    name = capabilities.get("cpu_name") or _name_in_proc() or platform.machine() or "CPU"
    there = [key.split("_") for key, value in capabilities.items() if value is True]
    features = [feature for feature in _CPU_FEATURES if any(feature in words for words in there)]
    has = instruction_set or ", ".join([torch.backends.cpu.get_cpu_capability().lower(), *features])
    return f"{' '.join(str(name).split())} ({has})"


def _name_in_proc() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == "model name" and value.strip()), None)


def write(file: Path, folder: Path, **facts: Any) -> None:
    """Write a report of the code that a folder has checked out, as of now."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    write_whole(file, Report(date=date, commit=_commit_of(folder), **facts).dumps())


def columns_of(dtypes: Mapping[str, Mapping[str, Counter[str]]]) -> dict[str, dict[str, Any]]:
    """Return what a report says of a kernel, by dtype."""
    found: dict[str, dict[str, Any]] = {}
    for dtype, checks in dtypes.items():
        total: Counter[str] = sum(checks.values(), Counter())
        counts: dict[str, Any] = {name: total[name] for name in ("passed", "refused", "skipped", "failed")}
        for name, of in (("absent", "passed"), ("failing", "failed")):
            listed = sorted(check for check, counter in checks.items() if bool(counter[of]) is (of == "failed"))
            if listed:
                counts[name] = listed
        found[dtype] = counts
    return found


def report_compiled(file: Path, rows: Any, folder: Path, selection: str) -> None:
    """Write a report of a compile matrix: of each kernel and chip, how many configurations kept their contract."""
    kernels: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        counts = kernels.setdefault(f"{row.op} {row.kernel}", {}).setdefault(
            row.chip or DECLARED, {"passed": 0, "refused": 0, "failed": 0}
        )
        kind = {"ok": "passed", "unsupported": "refused", "not offered": "refused"}.get(row.status, "failed")
        counts[kind] += 1
        for name in ("registers", "spills", "shared_memory"):
            value = getattr(row, name)
            if row.status == "ok" and value is not None:
                counts[name] = max(value, counts.get(name, 0))  # the worst of all configurations
    backends = sorted({row.backend for row in rows})
    used = {name: version for row in rows for name, version in row.versions.items()}
    made = {"backend": ", ".join(backends), "level": "compiled", "selection": selection}
    write(file, folder, **made, chip="", device="", versions=versions() | used, kernels=kernels)
