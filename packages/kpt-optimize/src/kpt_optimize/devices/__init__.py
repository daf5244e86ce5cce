"""Devices that torch itself drives, whatever the vendor: configuration, facts, memory, and a model's way to them.

`machine` has the devices that are here, the CPU among them; `targets` plans for those that are not.
"""

from .backend import AcceleratorBackend, PreparedModel
from .config import AppliedSettings, DeviceConfig, DeviceLike, apply_settings
from .facts import DeviceInfo, LiveState, MemoryStatistics, Peaks, live_state
from .manager import DeviceManager

__all__ = [
    "AcceleratorBackend",
    "AppliedSettings",
    "DeviceConfig",
    "DeviceInfo",
    "DeviceLike",
    "DeviceManager",
    "LiveState",
    "MemoryStatistics",
    "Peaks",
    "PreparedModel",
    "apply_settings",
    "live_state",
]
