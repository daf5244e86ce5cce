"""Memory of NVIDIA GPUs: allocation with a margin, pools, a guard, estimates, and smaller models."""

from .device_memory import NVIDIAMemoryManager
from .estimate import MemoryEstimate, estimate
from .guard import MemoryGuard
from .layout import LayoutReport, optimize_layout
from .model_memory import ModelMemoryReport, optimize_model_memory
from .out_of_memory import OutOfMemoryError, is_out_of_memory, largest_tensors
from .pools import MemoryPool
from .sizes import format_bytes, segment_bytes, storage_bytes, tensor_bytes
from .statistics import ManagerStatistics, PoolStatistics

__all__ = [
    "LayoutReport",
    "ManagerStatistics",
    "MemoryEstimate",
    "MemoryGuard",
    "MemoryPool",
    "ModelMemoryReport",
    "NVIDIAMemoryManager",
    "OutOfMemoryError",
    "PoolStatistics",
    "estimate",
    "format_bytes",
    "is_out_of_memory",
    "largest_tensors",
    "optimize_layout",
    "optimize_model_memory",
    "segment_bytes",
    "storage_bytes",
    "tensor_bytes",
]
