"""The devices of this machine, the CPU among them: `present`."""

import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from kpt_core import registry
from kpt_optimize.tuning.tables import processor

#: Instruction sets worth naming, by how torch spells them.
_INSTRUCTION_SETS = ("avx", "amx", "sve", "sme", "neon", "bf16", "i8mm", "dotprod", "asimd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device."""

    device: str  # as torch spells it, for instance `cuda:0`
    name: str  # the maker's name
    memory_bytes: int | None = None  # its whole memory, if it can be told
    features: tuple[str, ...] = ()  # instruction sets of a CPU, architecture of an accelerator

    @property
    def type(self) -> str:
        """Return torch's device type."""
        return self.device.partition(":")[0]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "type": self.type}


@dataclass(frozen=True, slots=True)
class Present:
    """The devices that are there, the CPU first, and what torch or a driver complained about when it was asked."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...]

    @property
    def kinds(self) -> tuple[Device, ...]:
        """Return one device of each kind: eight equal GPUs count once."""
        kinds: dict[tuple[str, str], Device] = {}
        for device in self.devices:
            kinds.setdefault((device.type, device.name), device)
        return tuple(kinds.values())


def present() -> Present:
    """Ask torch, and the backends for device types that torch does not know by itself."""
    devices: list[Device] = []
    notes: list[str] = []
    for probe in (_cpu, partial(_of_torch, "cuda"), partial(_of_torch, "xpu"), _mps, _other_accelerator, _of_backends):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                known = {device.type for device in devices}
                devices += [device for device in probe() if device.type not in known]
            except Exception as error:  # a broken driver must not hide the other devices
                notes.append(f"{type(error).__name__}: {error}")
        notes += [str(warning.message) for warning in caught]
    return Present(tuple(devices), tuple(notes))


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu() -> Iterator[Device]:
    found = {torch.backends.cpu.get_cpu_capability().lower()}
    tell: Any = getattr(torch.cpu, "get_capabilities", None)
    if tell is not None:
        found |= {name for name, there in tell().items() if there is True}
    else:  # older versions of torch have a private function for each instruction set
        for name in dir(torch.cpu):
            if name.startswith("_is_") and name.endswith("_supported") and getattr(torch.cpu, name)():
                found.add(name.removeprefix("_is_").removesuffix("_supported"))
    features = tuple(sorted(name for name in found if name.startswith(_INSTRUCTION_SETS) and name != "avx"))
    yield Device(device="cpu", name=processor(), memory_bytes=_ram(), features=features)


def _of_torch(kind: str) -> Iterator[Device]:
    module: Any = getattr(torch, kind)
    for index in range(module.device_count() if module.is_available() else 0):
        found = module.get_device_properties(index)
        features: tuple[str, ...] = ()
        if kind == "cuda":
            features = (found.gcnArchName if torch.version.hip else f"sm{found.major}{found.minor}",)
        yield Device(device=f"{kind}:{index}", name=found.name, memory_bytes=found.total_memory, features=features)


def _mps() -> Iterator[Device]:
    if torch.backends.mps.is_available():
        yield Device(device="mps", name=f"Apple {platform.machine()}", memory_bytes=_ram())


def _other_accelerator() -> Iterator[Device]:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for index in range(torch.accelerator.device_count() if kind is not None else 0):
        yield Device(device=f"{kind}:{index}", name=str(kind))


def _of_backends() -> Iterator[Device]:
    """List device types that only a ready backend knows, for instance `xla`."""
    for backend in registry.backends().values():
        for kind in set(backend.device_types) - {"cpu"}:
            try:
                torch.empty(0, device=kind)
            except (RuntimeError, AssertionError, NotImplementedError):
                continue
            yield Device(device=kind, name=f"told by {backend.name}")
