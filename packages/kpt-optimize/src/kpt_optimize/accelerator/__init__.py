"""Devices that torch itself drives, whatever the vendor: configuration, facts, memory, and a model's way to them."""

from .backend import AcceleratorBackend, PreparedModel
from .config import AppliedSettings, Device, DeviceConfig, apply_settings
from .devices import DeviceInfo, LiveState, MemoryStatistics, Peaks, live_state
from .manager import DeviceManager

__all__ = [
    "AcceleratorBackend",
    "AppliedSettings",
    "Device",
    "DeviceConfig",
    "DeviceInfo",
    "DeviceManager",
    "LiveState",
    "MemoryStatistics",
    "Peaks",
    "PreparedModel",
    "apply_settings",
    "live_state",
]
