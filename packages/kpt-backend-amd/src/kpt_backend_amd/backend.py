"""`AMDBackend`, and the facades over kpt_optimize for its devices: memory manager, optimiser, device manager."""

from types import SimpleNamespace
from typing import Any

from kpt_core import Kernel
from kpt_optimize.devices import AcceleratorBackend, DeviceConfig, DeviceInfo, DeviceLike, MemoryStatistics
from kpt_optimize.devices import DeviceManager as AnyDeviceManager
from kpt_optimize.memory import DeviceMemoryManager
from kpt_optimize.model import ModelOptimizer
from kpt_triton.table import KERNELS

from .chips import CHIPS, PRODUCTS, capabilities_of, chip_name, generation, peaks_of, unsupported
from .environment import why_no_device, why_unavailable

_LIBRARY = "kpt_fp8.torch_kernels.gpu_scaled_mm"
_RESULTS = ("float32", "bfloat16", "float16")
#: By hipBLASLt: each chip multiplies its own 8-bit numbers.
_HIPBLASLT = (
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_LIBRARY}:forward",
        unsupported=f"{_LIBRARY}:unsupported",
        requires={"hip", "fp8_e4m3fn"},
        dtypes={*_RESULTS, "float8_e4m3fn", "float8_e5m2"},
        priority=20,
    ),
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_LIBRARY}:forward_of_fnuz",
        unsupported=f"{_LIBRARY}:unsupported_of_fnuz",
        requires={"hip", "fp8_e4m3fnuz"},
        dtypes={*_RESULTS, "float8_e4m3fnuz", "float8_e5m2fnuz"},
        priority=20,
    ),
)


class AMDConfig(DeviceConfig):
    """Settings of `AMDBackend.prepare_model`; the fields are those of `kpt_optimize.devices.DeviceConfig`.

    PyTorch calls the devices of ROCm `cuda` too, so that is what `device` names.
    """

    __slots__ = ()


class AMDBackend(AcceleratorBackend):
    """KPT's backend for AMD GPUs: CDNA2 (MI200), CDNA3 (MI300), CDNA4 (MI350), RDNA3 and RDNA4.

    Making one costs nothing: the device is looked at when something is asked.

    Args:
        config: of `prepare_model`.
    """

    name = "amd"
    device_types = ("cuda",)
    chips = CHIPS
    products = PRODUCTS
    config_class = AMDConfig

    def unavailable(self) -> str | None:
        """Return None if kernels can run here, else why not and what to do, in a sentence."""
        return why_unavailable()

    def why_no_device(self) -> str | None:
        """Return why torch sees no AMD device, and the remedy; None if it sees one, which may be unsupported."""
        return why_no_device()

    def describe(self, properties: Any) -> dict[str, Any]:
        """Return what AMD's documents say of a device's chip and product."""
        chip = chip_name(properties.gcnArchName)
        return {
            "chip": chip,
            "generation": generation(chip),
            "capabilities": capabilities_of(chip),
            "unsupported": unsupported(chip),
            "peaks": peaks_of(properties.name),
        }

    def properties_of(self, product: str, chip: str) -> Any:
        """Return what `describe` reads of a device that is not here, as torch would tell it."""
        return SimpleNamespace(name=product, gcnArchName=chip)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return every kernel, also where none can run; nothing is compiled and Triton is not imported."""
        return (*(Kernel(**row, requires={"hip", "bf16"}) for row in KERNELS), *_HIPBLASLT)


BACKEND = AMDBackend()


class DeviceManager(AnyDeviceManager):
    """The AMD devices that torch sees: `unavailable`, `devices`, `roomiest()`, `on(device)`."""

    def __init__(self) -> None:
        super().__init__(BACKEND)


class AMDMemoryManager(DeviceMemoryManager):
    """Memory of one AMD device: see `kpt_optimize.memory.DeviceMemoryManager`."""

    backend = BACKEND


class AMDOptimizer(ModelOptimizer):
    """Optimise a model for an AMD GPU: see `kpt_optimize.model.ModelOptimizer`.

    Level `conservative`, `balanced` or `aggressive`, for inference and training. TF32 is not tried: no chip claims it.
    """

    backend = BACKEND


def device_info(device: DeviceLike = None, *, live: bool = True) -> DeviceInfo:
    """Return everything that torch and the driver tell of a device: see `AMDBackend.device_info`."""
    return BACKEND.device_info(device, live=live)


def memory_stats(device: DeviceLike = None) -> MemoryStatistics:
    """Return the memory of a device and of this process on it: see `AMDBackend.memory_stats`."""
    return BACKEND.memory_stats(device)
