"""KPT's backend for NVIDIA GPUs: where it runs, what the devices can do, its kernels, and what makes models fast there.

Importing it initialises no CUDA and imports no Triton.
"""

from .backend import NVIDIABackend, PreparedModel
from .chips import CHIPS, Peaks, capabilities_of, peaks_of
from .configuration import NVIDIAConfig
from .devices import DeviceInfo, DeviceManager, MemoryStatistics, device_info, memory_stats
from .environment import Environment, environment
from .memory import MemoryPool, NVIDIAMemoryManager, OutOfMemoryError
from .nvml import LiveState
from .optimizer import NVIDIAOptimizer, OptimizationReport, OptimizationWarning, OptimizerConfig
from .padded_linear import PaddedLinear
from .settings import AppliedSettings, apply_settings
from .shapes import (
    Padding,
    ShapeAdvice,
    advise,
    aligned_size,
    pad_linear,
    pad_model,
    tile_efficiency,
    unpad_model,
    wave_efficiency,
)

__version__ = "0.1.0"

BACKEND = NVIDIABackend()

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
    "NVIDIABackend",
    "NVIDIAConfig",
    "NVIDIAMemoryManager",
    "NVIDIAOptimizer",
    "OptimizationReport",
    "OptimizationWarning",
    "OptimizerConfig",
    "OutOfMemoryError",
    "PaddedLinear",
    "Padding",
    "Peaks",
    "PreparedModel",
    "ShapeAdvice",
    "advise",
    "aligned_size",
    "apply_settings",
    "capabilities_of",
    "device_info",
    "environment",
    "memory_stats",
    "pad_linear",
    "pad_model",
    "peaks_of",
    "tile_efficiency",
    "unpad_model",
    "wave_efficiency",
]
