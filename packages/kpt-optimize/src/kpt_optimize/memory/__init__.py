"""Memory of accelerators: allocation with a margin, pools, a guard, estimates, and smaller models."""

from .device_memory import DeviceMemoryManager
from .estimate import MemoryEstimate, estimate
from .guard import ManagerStatistics, OutOfMemoryError, is_out_of_memory
from .layout import LayoutReport, optimize_layout
from .model_memory import ModelMemoryReport, optimize_model_memory
from .pools import MemoryPool, PoolStatistics
from .sizes import format_bytes, segment_bytes, storage_bytes, tensor_bytes

__all__ = [
    "DeviceMemoryManager",
    "LayoutReport",
    "ManagerStatistics",
    "MemoryEstimate",
    "MemoryPool",
    "ModelMemoryReport",
    "OutOfMemoryError",
    "PoolStatistics",
    "estimate",
    "format_bytes",
    "is_out_of_memory",
    "optimize_layout",
    "optimize_model_memory",
    "segment_bytes",
    "storage_bytes",
    "tensor_bytes",
]
