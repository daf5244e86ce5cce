"""`NVIDIABackend`, and the facades over kpt_optimize for its devices: memory manager, optimiser, device manager."""

from types import SimpleNamespace
from typing import Any

from kpt_core import Kernel
from kpt_optimize.devices import AcceleratorBackend, DeviceConfig, DeviceInfo, DeviceLike, MemoryStatistics
from kpt_optimize.devices import DeviceManager as AnyDeviceManager
from kpt_optimize.memory import DeviceMemoryManager
from kpt_optimize.model import ModelOptimizer
from kpt_triton.table import KERNELS

from .chips import CHIPS, PRODUCTS, capabilities_of, chip_name, compute_capability, generation, peaks_of, unsupported
from .environment import why_no_device, why_unavailable

_LIBRARY = "kpt_fp8.torch_kernels.gpu_scaled_mm"
_FP8 = ("float8_e4m3fn", "float8_e5m2")
#: By cuBLASLt, and CUTLASS where each row has a scale.
_CUBLASLT = (
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_LIBRARY}:forward",
        unsupported=f"{_LIBRARY}:unsupported_but_tensors",
        requires={"fp8_e4m3fn"},
        dtypes={"float32", "bfloat16", "float16", *_FP8},
        priority=20,
    ),
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_LIBRARY}:forward_of_rows",
        unsupported=f"{_LIBRARY}:unsupported_but_rows",
        requires={"fp8_e4m3fn", "tma"},
        dtypes={"bfloat16", *_FP8},
        priority=20,
    ),
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_LIBRARY}_blocks:forward",
        unsupported=f"{_LIBRARY}_blocks:unsupported",
        requires={"fp8_e4m3fn", "wgmma"},
        dtypes={"float32", "bfloat16", "float8_e4m3fn"},
        priority=20,
    ),
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_LIBRARY}_blocks:forward_of_mx",
        unsupported=f"{_LIBRARY}_blocks:unsupported_but_mx",
        requires={"fp8_e4m3fn", "mxfp8"},
        dtypes={"float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"},
        priority=20,
    ),
)


class NVIDIAConfig(DeviceConfig):
    """Settings of `NVIDIABackend.prepare_model`; the fields are those of `kpt_optimize.devices.DeviceConfig`."""

    __slots__ = ()


class NVIDIABackend(AcceleratorBackend):
    """KPT's backend for NVIDIA GPUs from sm80 (Ampere) on.

    Making one costs nothing: CUDA is looked at when something is asked.

    Args:
        config: of `prepare_model`.
    """

    name = "nvidia"
    device_types = ("cuda",)
    chips = CHIPS
    products = PRODUCTS
    config_class = NVIDIAConfig
    tuning = "kpt_backend_nvidia:tuning"

    def unavailable(self) -> str | None:
        """Return None if kernels can run here, else why not and what to do, in a sentence."""
        return why_unavailable()

    def why_no_device(self) -> str | None:
        """Return why torch sees no NVIDIA device, and the remedy; None if it sees one, which may be too old."""
        return why_no_device()

    def describe(self, properties: Any) -> dict[str, Any]:
        """Return what NVIDIA's documents say of a device's chip and product."""
        capability = (int(properties.major), int(properties.minor))
        return {
            "chip": chip_name(capability),
            "generation": generation(capability),
            "capabilities": capabilities_of(capability),
            "unsupported": unsupported(capability),
            "peaks": peaks_of(properties.name),
        }

    def properties_of(self, product: str, chip: str) -> Any:
        """Return what `describe` reads of a device that is not here, as torch would tell it."""
        major, minor = compute_capability(chip)
        return SimpleNamespace(name=product, major=major, minor=minor)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return every kernel, also where none can run; nothing is compiled and Triton is not imported."""
        triton = (Kernel(**row, requires={"cp_async", "bf16"}) for row in KERNELS)
        return (*triton, *_CUBLASLT)


BACKEND = NVIDIABackend()


class DeviceManager(AnyDeviceManager):
    """The NVIDIA devices that torch sees: `unavailable`, `devices`, `roomiest()`, `on(device)`."""

    def __init__(self) -> None:
        super().__init__(BACKEND)


class NVIDIAMemoryManager(DeviceMemoryManager):
    """Memory of one NVIDIA device: see `kpt_optimize.memory.DeviceMemoryManager`."""

    backend = BACKEND


class NVIDIAOptimizer(ModelOptimizer):
    """Optimise a model for an NVIDIA GPU: see `kpt_optimize.model.ModelOptimizer`."""

    backend = BACKEND


def device_info(device: DeviceLike = None, *, live: bool = True) -> DeviceInfo:
    """Return everything that torch and NVML tell of a device: see `NVIDIABackend.device_info`."""
    return BACKEND.device_info(device, live=live)


def memory_stats(device: DeviceLike = None) -> MemoryStatistics:
    """Return the memory of a device and of this process on it: see `NVIDIABackend.memory_stats`."""
    return BACKEND.memory_stats(device)
