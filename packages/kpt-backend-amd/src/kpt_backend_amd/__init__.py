"""KPT's backend for AMD GPUs: where it runs, what the devices can do, its kernels, and what makes models fast there.

Importing it initialises no HIP and imports no Triton.
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
    AMDBackend,
    AMDConfig,
    AMDMemoryManager,
    AMDOptimizer,
    DeviceManager,
    device_info,
    memory_stats,
)
from .chips import CHIPS, capabilities_of, peaks_of
from .compiler import Compiled, ROCmCompiler
from .environment import Environment, environment

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "CHIPS",
    "AMDBackend",
    "AMDConfig",
    "AMDMemoryManager",
    "AMDOptimizer",
    "AppliedSettings",
    "Compiled",
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
    "ROCmCompiler",
    "apply_settings",
    "capabilities_of",
    "device_info",
    "environment",
    "memory_stats",
    "peaks_of",
]
