"""`XPUBackend`, and the facades over kpt_optimize for its devices: memory manager, optimiser, device manager."""

from typing import Any

from kpt_core import Kernel
from kpt_optimize.devices import AcceleratorBackend, DeviceConfig, DeviceInfo, DeviceLike, MemoryStatistics
from kpt_optimize.devices import DeviceManager as AnyDeviceManager
from kpt_optimize.memory import DeviceMemoryManager
from kpt_optimize.model import ModelOptimizer
from kpt_triton.table import KERNELS

from .chips import CHIPS, PRODUCTS, capabilities_of, chip_of, generation, properties_of, unsupported
from .environment import why_no_device, why_unavailable


class XPUConfig(DeviceConfig):
    """Settings of `XPUBackend.prepare_model`; the fields are those of `kpt_optimize.devices.DeviceConfig`."""

    __slots__ = ()


class XPUBackend(AcceleratorBackend):
    """KPT's backend for Intel GPUs on torch's own `xpu` devices: Data Center GPU Max, Arc B, Lunar Lake.

    Making one costs nothing: the device is looked at when something is asked.

    Args:
        config: of `prepare_model`.
    """

    name = "xpu"
    device_types = ("xpu",)
    chips = CHIPS
    products = PRODUCTS
    config_class = XPUConfig

    def unavailable(self) -> str | None:
        """Return None if kernels can run here, else why not and what to do, in a sentence."""
        return why_unavailable()

    def why_no_device(self) -> str | None:
        """Return why torch sees no Intel GPU, and the remedy; None if it sees one, which may be unsupported."""
        return why_no_device()

    def describe(self, properties: Any) -> dict[str, Any]:
        """Return what is known of a device's chip and product."""
        chip = chip_of(properties)
        return {
            "chip": chip,
            "generation": generation(chip),
            "capabilities": capabilities_of(properties),
            "unsupported": unsupported(properties),
            "peaks": PRODUCTS.get(properties.name),
        }

    def properties_of(self, product: str, chip: str) -> Any:
        """Return what `describe` reads of a device that is not here, as torch would tell it."""
        return properties_of(product, chip)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return every kernel, also where none can run; nothing is compiled and Triton is not imported."""
        return tuple(Kernel(**row, requires={"xpu", "bf16", "dpas"}) for row in KERNELS)


BACKEND = XPUBackend()


class DeviceManager(AnyDeviceManager):
    """The Intel GPUs that torch sees: `unavailable`, `devices`, `roomiest()`, `on(device)`."""

    def __init__(self) -> None:
        super().__init__(BACKEND)


class XPUMemoryManager(DeviceMemoryManager):
    """Memory of one Intel GPU: see `kpt_optimize.memory.DeviceMemoryManager`."""

    backend = BACKEND


class XPUOptimizer(ModelOptimizer):
    """Optimise a model for an Intel GPU: see `kpt_optimize.model.ModelOptimizer`.

    Level `conservative`, `balanced` or `aggressive`, for inference and training. TF32 is not tried: no chip claims it.
    """

    backend = BACKEND


def device_info(device: DeviceLike = None, *, live: bool = True) -> DeviceInfo:
    """Return everything that torch and the driver tell of a device: see `XPUBackend.device_info`."""
    return BACKEND.device_info(device, live=live)


def memory_stats(device: DeviceLike = None) -> MemoryStatistics:
    """Return the memory of a device and of this process on it: see `XPUBackend.memory_stats`."""
    return BACKEND.memory_stats(device)
