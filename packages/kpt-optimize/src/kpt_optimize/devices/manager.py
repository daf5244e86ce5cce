"""`DeviceManager`: the devices of a backend that torch sees."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .backend import AcceleratorBackend
from .config import DeviceLike
from .facts import DeviceInfo


class DeviceManager:
    """The devices of a backend that torch sees, whether or not there are any; a vendor's manager knows its backend.

    Examples:
        >>> with manager.on(manager.roomiest()):
        ...     x = torch.empty(1024, device="cuda")
    """

    def __init__(self, backend: AcceleratorBackend) -> None:
        self._backend = backend

    @property
    def unavailable(self) -> str | None:
        """Why KPT's kernels run on no device here; None if they do."""
        return self._backend.unavailable()

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every device that torch sees, unsupported ones too; empty without any."""
        if self._backend.why_no_device() is not None:
            return ()
        count = torch.get_device_module(self._backend.device_types[0]).device_count()
        return tuple(map(self._backend.device_info, range(count)))

    def roomiest(self) -> torch.device | None:
        """Return the supported device with the most free memory; None if there is none (`unavailable` says why)."""
        kind = self._backend.device_types[0]
        supported = [info for info in self.devices if info.unsupported is None]
        best = max(supported, key=lambda info: _free_memory(kind, info), default=None)
        return None if best is None else torch.device(kind, best.index)

    @contextmanager
    def on(self, device: DeviceLike) -> Iterator[torch.device]:
        """Have a device be the current one inside the block."""
        found = self._backend.device(device)
        with torch.get_device_module(found).device(found.index):
            yield found


def _free_memory(kind: str, info: DeviceInfo) -> int:
    """Bytes. The driver is asked first: torch makes a context of hundreds of megabytes on each device that it asks."""
    divided = " MIG " in info.name  # the driver counts the whole GPU then
    if not divided and info.memory is not None and info.live is not None and info.live.memory_used is not None:
        return info.memory - info.live.memory_used
    return int(torch.get_device_module(kind).mem_get_info(info.index)[0])
