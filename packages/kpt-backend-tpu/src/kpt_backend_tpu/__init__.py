"""KPT's backend for Google's TPUs: where it runs, what the devices can do, and its kernels in Pallas.

Importing it imports neither torch_xla nor JAX, and claims no TPU.
"""

from kpt_optimize.accelerator import DeviceInfo, MemoryStatistics, Peaks, PreparedModel

from .backend import BACKEND, TPUBackend, TPUConfig, device_info, memory_stats
from .chips import CHIPS, TPUS, Chip
from .environment import Environment, environment

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "CHIPS",
    "TPUS",
    "Chip",
    "DeviceInfo",
    "Environment",
    "MemoryStatistics",
    "Peaks",
    "PreparedModel",
    "TPUBackend",
    "TPUConfig",
    "device_info",
    "environment",
    "memory_stats",
]
