"""CUDA simulated: `torch.cuda` and NVML answer for devices that are not there, and nothing is computed on them.

`simulate(monkeypatch, FakeDevice(...))` makes torch say that it is built for CUDA and sees these devices. What is asked
about devices, memory and versions is answered; a tensor can't be put on them.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30


@dataclass(kw_only=True)
class FakeDevice:
    """A device as torch and NVML tell of it.

    Args:
        capability: compute capability.
        name: the product.
        memory: bytes.
        used: bytes taken by anybody.
        reserved: bytes that PyTorch's allocator took.
        allocated: bytes of these that tensors have.
        multiprocessors: of the chip.
        lacking: properties that this version of PyTorch does not have.
        extra: properties beside those below.
        stats: what `torch.cuda.memory_stats` gives beside what follows from the above.
    """

    capability: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GIB
    used: int = 0
    reserved: int = 0
    allocated: int = 0
    multiprocessors: int = 132
    lacking: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

    def properties(self, index: int) -> SimpleNamespace:
        """What `torch.cuda.get_device_properties` gives."""
        values: dict[str, Any] = {
            "name": self.name,
            "major": self.capability[0],
            "minor": self.capability[1],
            "total_memory": self.memory,
            "multi_processor_count": self.multiprocessors,
            "uuid": fake_uuid(index),
            "L2_cache_size": 50 * 2**20,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_block_optin": 227 * 1024,
            "shared_memory_per_multiprocessor": 228 * 1024,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 2048,
            "warp_size": 32,
            **self.extra,
        }
        return SimpleNamespace(**{name: value for name, value in values.items() if name not in self.lacking})


def fake_uuid(index: int) -> str:
    """Of the device that the machine counts as `index`."""
    return f"{index:08d}-0000-0000-0000-000000000000"


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    *devices: FakeDevice,
    cuda: str = "13.0",
    driver: str = "580.65.06",
    driver_cuda: int = 13000,
    arch_list: tuple[str, ...] = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    initialised: bool = True,
    warning: str | None = None,
) -> SimpleNamespace:
    """Make torch and NVML tell of these devices until the test ends.

    Args:
        monkeypatch: of the test.
        *devices: in the order in which CUDA counts them; none means that torch sees none.
        cuda: the version that torch is built for.
        driver: the driver's version.
        driver_cuda: CUDA version of the driver, as NVML writes it: 13000 is 13.0.
        arch_list: what torch's own kernels are compiled for.
        initialised: whether CUDA is said to be initialised; if not, asking a device's properties sets it.
        warning: what torch warns of when it is asked whether CUDA is there.

    Returns:
        The state: `current` (index of the current device), `initialised`, `fractions` (memory fractions by device).
    """
    state = SimpleNamespace(current=0, initialised=initialised, fractions={}, devices=devices)

    def is_available() -> bool:
        if warning is not None:
            import warnings

            warnings.warn(warning, UserWarning, stacklevel=2)
        return bool(devices)

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(state.current)
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(state.current) if index is None else index

    def properties(device: Any = None) -> SimpleNamespace:
        state.initialised = True
        index = index_of(device)
        if not 0 <= index < len(devices):
            raise AssertionError("Invalid device id")
        return devices[index].properties(index)

    def of(device: Any) -> FakeDevice:
        return devices[index_of(device)]

    def stats(device: Any = None) -> dict[str, int]:
        found = of(device)
        return {
            "allocated_bytes.all.peak": found.allocated,
            "reserved_bytes.all.peak": found.reserved,
            "allocated_bytes.all.current": found.allocated,
            "reserved_bytes.all.current": found.reserved,
            **found.stats,
        }

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before, state.current = state.current, index_of(device)
        try:
            yield
        finally:
            state.current = before

    def capability(device: Any = None) -> tuple[int, int]:
        found = properties(device)
        return found.major, found.minor

    answers = {
        "is_available": is_available,
        "is_initialized": lambda: state.initialised,
        "device_count": lambda: len(devices),
        "current_device": lambda: state.current,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": lambda device=None: of(device).name,
        "mem_get_info": lambda device=None: (of(device).memory - of(device).used, of(device).memory),
        "memory_allocated": lambda device=None: of(device).allocated,
        "memory_reserved": lambda device=None: of(device).reserved,
        "max_memory_allocated": lambda device=None: stats(device)["allocated_bytes.all.peak"],
        "max_memory_reserved": lambda device=None: stats(device)["reserved_bytes.all.peak"],
        "memory_stats": stats,
        "get_arch_list": lambda: list(arch_list),
        "set_per_process_memory_fraction": lambda fraction, device=None: state.fractions.__setitem__(
            index_of(device), fraction
        ),
        "device": on,
        # What torch asks NVML for.
        "power_draw": lambda device=None: 100_000 + 1000 * index_of(device),
        "temperature": lambda device=None: 41,
        "utilization": lambda device=None: 10 * index_of(device),
        "memory_usage": lambda device=None: 5,
        "clock_rate": lambda device=None: 1200,
        "device_memory_used": lambda device=None: of(device).used,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    simulate_nvml(monkeypatch, *devices, driver=driver, driver_cuda=driver_cuda)
    return state


def simulate_nvml(
    monkeypatch: pytest.MonkeyPatch,
    *devices: FakeDevice,
    driver: str = "580.65.06",
    driver_cuda: int = 13000,
    broken: str | None = None,
    refused: tuple[str, ...] = (),
) -> None:
    """Put another `pynvml` in place until the test ends.

    It counts the devices backwards, as it may on a real machine.

    Args:
        monkeypatch: of the test.
        *devices: of the machine.
        driver: the driver's version.
        driver_cuda: CUDA version of the driver.
        broken: what `nvmlInit` complains of.
        refused: functions that raise "Not Supported".
    """
    nvml: Any = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answer(name: str, value: Any) -> Any:
        def function(*args: Any) -> Any:
            if name in refused:
                raise NVMLError("Not Supported")
            return value(*args) if callable(value) else value

        return function

    def start() -> None:
        if broken is not None:
            raise NVMLError(broken)

    functions = {
        "nvmlSystemGetDriverVersion": driver,
        "nvmlSystemGetCudaDriverVersion_v2": driver_cuda,
        "nvmlDeviceGetCount": len(devices),
        "nvmlDeviceGetHandleByIndex": lambda index: len(devices) - 1 - index,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: devices[handle].capability,
    }
    for name, value in functions.items():
        setattr(nvml, name, answer(name, value))
    nvml.nvmlInit = start
    nvml.NVMLError = NVMLError
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
