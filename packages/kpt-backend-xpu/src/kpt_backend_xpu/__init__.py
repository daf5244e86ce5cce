"""KPT's backend for Intel GPUs: where it runs, what the devices can do, its kernels, and what makes models fast there.

Importing it starts no SYCL and imports no Triton.
"""

from kpt_optimize.devices import (
    AppliedSettings,
    DeviceInfo,
    LiveState,
    MemoryStatistics,
    Peaks,
    PreparedModel,
    apply_settings,
)
from kpt_optimize.memory import MemoryPool, OutOfMemoryError
from kpt_optimize.model import OptimizationReport, OptimizationWarning, OptimizerConfig

from .backend import (
    BACKEND,
    DeviceManager,
    XPUBackend,
    XPUConfig,
    XPUMemoryManager,
    XPUOptimizer,
    device_info,
    memory_stats,
)
from .chips import CHIPS
from .environment import Environment, environment

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "CHIPS",
    "AppliedSettings",
    "DeviceInfo",
    "DeviceManager",
    "Environment",
    "LiveState",
    "MemoryPool",
    "MemoryStatistics",
    "OptimizationReport",
    "OptimizationWarning",
    "OptimizerConfig",
    "OutOfMemoryError",
    "Peaks",
    "PreparedModel",
    "XPUBackend",
    "XPUConfig",
    "XPUMemoryManager",
    "XPUOptimizer",
    "apply_settings",
    "device_info",
    "environment",
    "memory_stats",
]
