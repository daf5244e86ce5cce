"""KPT's backend for Google's TPUs: where it runs, what the devices can do, and its kernels in Pallas.

Importing it imports neither torch_xla nor JAX, and claims no TPU.
"""

from kpt_optimize.devices import DeviceInfo, MemoryStatistics, Peaks, PreparedModel

from .backend import BACKEND, TPUBackend, TPUConfig, device_info, memory_stats
from .cache import Compilations, compilations, keep_compilations
from .chips import CHIPS, TPUS, Chip
from .environment import Environment, environment
from .spmd import shard_attention, shard_experts
from .xla import Bucketed, TPUOptimizer, powers_of_two

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "CHIPS",
    "TPUS",
    "Bucketed",
    "Chip",
    "Compilations",
    "DeviceInfo",
    "Environment",
    "MemoryStatistics",
    "Peaks",
    "PreparedModel",
    "TPUBackend",
    "TPUConfig",
    "TPUOptimizer",
    "compilations",
    "device_info",
    "environment",
    "keep_compilations",
    "memory_stats",
    "powers_of_two",
    "shard_attention",
    "shard_experts",
]
