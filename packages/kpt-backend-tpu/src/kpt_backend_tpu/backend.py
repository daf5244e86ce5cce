"""`TPUBackend`, and the devices that it finds."""

from types import ModuleType
from typing import Any

import torch

from kpt_core import Capability, InputError, Kernel
from kpt_optimize.devices import AcceleratorBackend, DeviceConfig, DeviceInfo, DeviceLike, MemoryStatistics
from kpt_optimize.devices.config import device_of_type

from .chips import CHIPS, PRODUCTS, TPUS, capabilities_of, product_of, properties_of, unsupported
from .environment import chip, interpreting, torch_tpu, why_no_device, why_unavailable
from .table import KERNELS

#: Settings that mean nothing on a TPU.
_OF_OTHERS = ("channels_last", "allow_tf32", "cudnn_benchmark", "deterministic", "memory_fraction")


class TPUConfig(DeviceConfig):
    """Settings of `TPUBackend.prepare_model`: `device`, `dtype` and `pad` of `kpt_optimize.devices.DeviceConfig`.

    Raises:
        InputError: a value is not allowed, or a setting means nothing on a TPU.
    """

    __slots__ = ()
    device_type = "xla"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _OF_OTHERS:
            if getattr(self, name):
                told = "XLA chooses layouts and algorithms, and is deterministic"
                raise InputError(f"{name} must be left as it is on a TPU, where {told}; got {getattr(self, name)!r}")


class TPUBackend(AcceleratorBackend):
    """KPT's backend for Google's TPUs: v4, v5e, v5p, v6e and 7x, through torch_xla.

    Making one costs nothing: torch_xla is imported when a device is asked for, since that claims the TPU.

    Args:
        config: of `prepare_model`.
    """

    name = "tpu"
    device_types = ("xla", "tpu")
    chips = CHIPS
    products = PRODUCTS
    config_class = TPUConfig

    def unavailable(self) -> str | None:
        """Return None if kernels can run here, else why not and what to do, in a sentence."""
        return why_unavailable()

    def why_no_device(self) -> str | None:
        """Return why torch has no TPU, and the remedy; None if it has one, which may be unsupported."""
        return why_no_device()

    def describe(self, properties: Any) -> dict[str, Any]:
        """Return what Google's documents say of a device's chip and product."""
        return {
            "chip": properties.chip,
            "generation": product_of(properties.chip),
            "capabilities": capabilities_of(properties.chip),
            "unsupported": unsupported(properties.chip),
            "peaks": PRODUCTS.get(properties.name),
        }

    def properties_of(self, product: str, chip: str) -> Any:
        """Return what `describe` reads of a device, here or not."""
        return properties_of(product, chip)

    def device(self, device: DeviceLike = None) -> torch.device:
        """Return a device with its index, by default the configuration's, else the first.

        Raises:
            InputError: there is no such device, or none at all.
        """
        kind = "tpu" if torch_tpu() else "xla"
        named = device_of_type(self.config.device if device is None else device, kind)
        reason = self.why_no_device()
        if reason is not None:
            raise InputError(f"{named or f'a device of type {kind}'} was asked for: {reason}")
        count, index = _devices(kind), named.index or 0 if named is not None else 0
        if index >= count:
            raise InputError(f"{kind}:{index} was asked for; torch has {count} of them, from {kind}:0")
        return torch.device(kind, index)

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """Return what a device can do: a TPU by its chip; without one, what is interpreted for tests.

        Raises:
            InputError: the device is of another type.
        """
        if device.type not in self.device_types:
            raise InputError(f"device must be of type {' or '.join(self.device_types)}; got {device}")
        if self.why_no_device() is not None:
            return frozenset()
        return frozenset({"tpu", "mxu", "bf16"}) if chip() not in TPUS and interpreting() else capabilities_of(chip())

    def device_info(self, device: DeviceLike = None, *, live: bool = True) -> DeviceInfo:
        """Return what is known of a device; torch_xla tells neither clocks nor power.

        Raises:
            InputError: there is no such device.
        """
        found, here = self.device(device), chip()
        core = TPUS.get(here)
        told = self.describe(properties_of(product_of(here), here))
        return DeviceInfo(
            index=found.index,
            name=product_of(here),
            uuid=None,
            memory=None if told["peaks"] is None else told["peaks"].memory * 2**30,
            multiprocessors=None if core is None else core.cores,
            l2_cache=None,
            shared_memory_per_block=None if core is None else core.vmem,
            shared_memory_per_multiprocessor=None if core is None else core.vmem,
            registers_per_multiprocessor=None,
            threads_per_multiprocessor=None,
            live=None,
            live_missing="torch_xla does not tell it; `tpu-info` does" if live else "it was not asked for",
            **told,
        )

    def device_name(self, device: torch.device) -> str:
        """Return the name of a device's model, which tuning tables and locks go by."""
        return product_of(chip())

    def synchronize(self, device: torch.device) -> None:
        """Run what is waiting in torch_xla's graph, and wait for it."""
        if device.type == "xla":
            _torch_xla().sync(wait=True)
        else:
            super().synchronize(device)

    def memory_stats(self, device: DeviceLike = None) -> MemoryStatistics:
        """Return the memory of a device, by default the configuration's, and of this process on it.

        Raises:
            InputError: there is no such device, or it does not tell.
        """
        found = self.device(device)
        if found.type == "tpu":
            return super().memory_stats(found)
        from torch_xla.core.xla_model import get_memory_info

        try:
            told = get_memory_info(found)
        except RuntimeError as error:
            raise InputError(f"{found} does not tell its memory: {str(error).splitlines()[0]}") from None
        used, peak = told["bytes_used"], told.get("peak_bytes_used", told["bytes_used"])
        return MemoryStatistics(
            total=told["bytes_limit"],
            free=told["bytes_limit"] - used,
            allocated=used,
            allocated_peak=peak,
            reserved=used,  # XLA reserves nothing beyond it
            reserved_peak=peak,
            elsewhere=0,  # one process has the whole chip
            split=0,
            retries=0,
            out_of_memory=0,
        )

    def kernels(self) -> tuple[Kernel, ...]:
        """Return every kernel, also where none can run; nothing is compiled and JAX is not imported."""
        return KERNELS


BACKEND = TPUBackend()


def device_info(device: DeviceLike = None, *, live: bool = True) -> DeviceInfo:
    """Return everything that is known of a device: see `TPUBackend.device_info`."""
    return BACKEND.device_info(device, live=live)


def memory_stats(device: DeviceLike = None) -> MemoryStatistics:
    """Return the memory of a device and of this process on it: see `TPUBackend.memory_stats`."""
    return BACKEND.memory_stats(device)


def _devices(kind: str) -> int:
    return int(_torch_xla().device_count() if kind == "xla" else torch.get_device_module(kind).device_count())


def _torch_xla() -> ModuleType:
    import torch_xla

    return torch_xla  # type: ignore[no-any-return]
