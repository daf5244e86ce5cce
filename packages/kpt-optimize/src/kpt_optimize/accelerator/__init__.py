"""Devices that torch itself drives, whatever the vendor: configuration, facts, memory, and a model's way to them."""

from .backend import AcceleratorBackend, PreparedModel
from .config import Device, DeviceConfig
from .devices import DeviceInfo, DeviceManager, LiveState, MemoryStatistics, Peaks, live_state
from .settings import AppliedSettings, apply_settings

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
