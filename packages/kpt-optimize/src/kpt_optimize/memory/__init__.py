"""Memory of accelerators: allocation with a margin, pools, a guard, estimates, and smaller models."""

from .checkpoint import LEVELS, checkpoint_blocks
from .device_memory import DeviceMemoryManager, ManagerStatistics, OutOfMemoryError, is_out_of_memory
from .estimate import MemoryEstimate, estimate
from .fit import Fit, LevelEstimate, compare_levels, fit
from .models import ModelMemoryReport, optimize_layout, optimize_model_memory
from .pools import MemoryPool, PoolStatistics
from .sizes import format_bytes, segment_bytes, storage_bytes

__all__ = [
    "LEVELS",
    "DeviceMemoryManager",
    "Fit",
    "LevelEstimate",
    "ManagerStatistics",
    "MemoryEstimate",
    "MemoryPool",
    "ModelMemoryReport",
    "OutOfMemoryError",
    "PoolStatistics",
    "checkpoint_blocks",
    "compare_levels",
    "estimate",
    "fit",
    "format_bytes",
    "is_out_of_memory",
    "optimize_layout",
    "optimize_model_memory",
    "segment_bytes",
    "storage_bytes",
]
