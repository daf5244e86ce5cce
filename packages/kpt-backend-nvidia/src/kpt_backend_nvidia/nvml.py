"""What NVML, the driver's management library, tells: it needs no CUDA context and does not initialise CUDA.

Every fact is asked on its own: what a driver, a permission or a part of a GPU refuses is None, and the rest is there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class NvmlError(Exception):
    """NVML does not answer; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The driver of this machine.

    Attributes:
        version: for instance `580.65.06`.
        cuda: the newest CUDA that it supports, major and minor.
        missing: why these are None.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """A device at this moment; a fact that the driver does not give is None.

    Attributes:
        power: drawn, watts.
        power_limit: in force, watts.
        temperature: of the chip, degrees Celsius.
        busy: share of the last sample period in which a kernel ran, 0 to 1.
        memory_busy: share of the last sample period in which memory was read or written, 0 to 1.
        sm_clock: of the multiprocessors, MHz.
        sm_clock_max: the highest that they may have, MHz.
        memory_clock: MHz.
        mig: whether the GPU is divided into instances (MIG).
        memory_free: bytes of the whole GPU that nobody uses.
    """

    power: float | None
    power_limit: float | None
    temperature: int | None
    busy: float | None
    memory_busy: float | None
    sm_clock: int | None
    sm_clock_max: int | None
    memory_clock: int | None
    mig: bool | None
    memory_free: int | None


def driver() -> Driver:
    """The driver's versions; never raises."""
    try:
        nvml = _library()
    except NvmlError as error:
        return Driver(missing=str(error))
    version = _ask(nvml.nvmlSystemGetDriverVersion)
    number = _ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Driver(version=_text(version), cuda=None if number is None else (number // 1000, number % 1000 // 10))


def compute_capabilities() -> tuple[tuple[int, int], ...] | None:
    """Compute capabilities of every GPU of this machine, hidden ones too; None if NVML does not answer."""
    try:
        nvml = _library()
    except NvmlError:
        return None
    handles = [_ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(_ask(nvml.nvmlDeviceGetCount) or 0)]
    told = [_ask(nvml.nvmlDeviceGetCudaComputeCapability, handle) for handle in handles if handle is not None]
    return tuple((int(pair[0]), int(pair[1])) for pair in told if pair is not None)


def live_state(uuid: str | None, pci_address: str | None) -> LiveState:
    """What NVML says of a device.

    CUDA counts the devices that `CUDA_VISIBLE_DEVICES` leaves, in an order of its own; NVML counts all, by their place
    on the bus. So a device is found by what both call the same.

    Args:
        uuid: as torch gives it, without the prefix of its kind.
        pci_address: domain, bus and device, as in `00000000:3b:00.0`.

    Raises:
        NvmlError: the library, the driver or the device is not there; the message says which.
    """
    nvml = _library()
    handle = _find(nvml, uuid, pci_address)

    def milli(value: Any) -> float | None:
        return None if value is None else value / 1000

    def share(value: Any) -> float | None:
        return None if value is None else value / 100

    busy = _ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    mig = _ask(nvml.nvmlDeviceGetMigMode, handle)
    return LiveState(
        power=milli(_ask(nvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit=milli(_ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        temperature=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        busy=share(getattr(busy, "gpu", None)),
        memory_busy=share(getattr(busy, "memory", None)),
        sm_clock=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        sm_clock_max=_ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        mig=None if mig is None else bool(mig[0]),
        memory_free=None if memory is None else int(memory.free),
    )


def _library() -> Any:
    """The module `pynvml`, initialised for the rest of the process: the first time takes milliseconds."""
    try:
        import pynvml
    except ImportError:
        raise NvmlError("nvidia-ml-py is not installed; pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlError(f"NVML did not start: {error}") from None
    return pynvml


def _find(nvml: Any, uuid: str | None, pci_address: str | None) -> Any:
    if uuid is not None:
        for kind in ("GPU", "MIG"):
            handle = _ask(nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{uuid}")
            if handle is not None:
                return handle
    handle = None if pci_address is None else _ask(nvml.nvmlDeviceGetHandleByPciBusId, pci_address)
    if handle is None:
        raise NvmlError(f"NVML knows no device of UUID {uuid} or PCI address {pci_address}")
    return handle


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    """The answer, or None if NVML refuses it."""
    import pynvml

    try:
        return function(*args)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
