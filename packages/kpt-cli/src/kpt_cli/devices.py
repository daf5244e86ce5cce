"""The devices of this machine, whatever version of torch tells about them."""

import os
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Instruction sets worth naming, by how torch spells them.
_INSTRUCTION_SETS = ("avx", "amx", "sve", "sme", "neon", "bf16", "i8mm", "dotprod", "asimd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        device: as torch spells it, for instance `cuda:0`.
        name: the maker's name.
        memory_bytes: its whole memory, if it can be told.
        features: instruction sets of a CPU, architecture of an accelerator.
    """

    device: str
    name: str
    memory_bytes: int | None
    features: tuple[str, ...]

    @property
    def type(self) -> str:
        """Torch's device type."""
        return self.device.partition(":")[0]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "type": self.type}


@dataclass(frozen=True, slots=True)
class Present:
    """What is there.

    Attributes:
        devices: the CPU first.
        notes: what torch or a driver complained about while it was asked.
    """

    devices: tuple[Device, ...]
    notes: tuple[str, ...]

    @property
    def kinds(self) -> tuple[Device, ...]:
        """One device of each kind: eight equal GPUs count once."""
        kinds: dict[tuple[str, str], Device] = {}
        for device in self.devices:
            kinds.setdefault((device.type, device.name), device)
        return tuple(kinds.values())


def present() -> Present:
    """Ask torch, and the backends for device types that torch does not know by itself."""
    devices: list[Device] = []
    notes: list[str] = []
    for probe in (_cpu, _cuda, _xpu, _mps, _other_accelerator, _of_backends):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                known = {device.type for device in devices}
                devices += [device for device in probe() if device.type not in known]
            except Exception as error:  # a broken driver must not hide the other devices
                notes.append(f"{probe.__name__.strip('_')}: {type(error).__name__}: {error}")
        notes += [str(warning.message) for warning in caught]
    return Present(tuple(devices), tuple(notes))


def _cpu() -> Iterator[Device]:
    yield Device(device="cpu", name=_cpu_name(), memory_bytes=_ram(), features=_instruction_sets())


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _instruction_sets() -> tuple[str, ...]:
    import torch

    found = {torch.backends.cpu.get_cpu_capability().lower()}
    tell: Callable[[], dict[str, Any]] | None = getattr(torch.cpu, "get_capabilities", None)
    if tell is not None:
        found |= {name for name, there in tell().items() if there is True}
    else:  # older versions of torch have a private function for each instruction set
        for name in dir(torch.cpu):
            if name.startswith("_is_") and name.endswith("_supported") and getattr(torch.cpu, name)():
                found.add(name.removeprefix("_is_").removesuffix("_supported"))
    return tuple(sorted(name for name in found if name.startswith(_INSTRUCTION_SETS) and name != "avx"))


def _cuda() -> Iterator[Device]:
    import torch

    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        feature = architecture or f"sm{properties.major}{properties.minor}"
        yield Device(
            device=f"cuda:{index}",
            name=str(properties.name),
            memory_bytes=int(properties.total_memory),
            features=(feature,),
        )


def _xpu() -> Iterator[Device]:
    import torch

    xpu = getattr(torch, "xpu", None)
    if xpu is None or not xpu.is_available():
        return
    for index in range(xpu.device_count()):
        properties = xpu.get_device_properties(index)
        memory = getattr(properties, "total_memory", None)
        yield Device(
            device=f"xpu:{index}",
            name=str(xpu.get_device_name(index)),
            memory_bytes=None if memory is None else int(memory),
            features=(),
        )


def _mps() -> Iterator[Device]:
    import torch

    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        yield Device(device="mps", name=f"Apple {platform.machine()}", memory_bytes=_ram(), features=())


def _other_accelerator() -> Iterator[Device]:
    """Whatever `torch.accelerator` (torch 2.6) knows beyond the types above."""
    import torch

    generic = getattr(torch, "accelerator", None)
    if generic is None or not generic.is_available():
        return
    kind = generic.current_accelerator()
    if kind is not None:
        for index in range(generic.device_count()):
            yield Device(device=f"{kind.type}:{index}", name=kind.type, memory_bytes=None, features=())


def _of_backends() -> Iterator[Device]:
    """Device types that only a ready backend knows, for instance `xla`."""
    import kpt_core

    for backend in kpt_core.backends().values():
        for kind in backend.device_types:
            if kind != "cpu" and _exists(kind):
                yield Device(device=kind, name=f"told by {backend.name}", memory_bytes=None, features=())


def _exists(device_type: str) -> bool:
    import torch

    try:
        torch.empty(0, device=device_type)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True
