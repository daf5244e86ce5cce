"""KPT's backend for NVIDIA GPUs: where it runs, what the devices can do, its kernels, and what makes models fast there.

Importing it initialises no CUDA and imports no Triton.
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
from kpt_optimize.padding import (
    PaddedLinear,
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

from .backend import (
    BACKEND,
    DeviceManager,
    NVIDIABackend,
    NVIDIAConfig,
    NVIDIAMemoryManager,
    NVIDIAOptimizer,
    device_info,
    memory_stats,
)
from .chips import CHIPS, capabilities_of, peaks_of
from .environment import Environment, environment
from .fp8_compiler import FP8Compiler
from .fp8_figures import FP8Statistics, LayerSpeedup, SpeedupEstimate

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "CHIPS",
    "AppliedSettings",
    "DeviceInfo",
    "DeviceManager",
    "Environment",
    "FP8Compiler",
    "FP8Statistics",
    "LayerSpeedup",
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
    "SpeedupEstimate",
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
