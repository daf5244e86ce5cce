"""Less memory for experts: on the device only those in use (inference), fewer saved activations (training)."""

from .activation_memory import CheckpointedExperts, checkpoint_experts
from .cache import ExpertCache, LayerStatistics
from .offloading import Offloading, offload_experts
from .store import DiskStore, ExpertStore, HostStore

__all__ = [
    "CheckpointedExperts",
    "DiskStore",
    "ExpertCache",
    "ExpertStore",
    "HostStore",
    "LayerStatistics",
    "Offloading",
    "checkpoint_experts",
    "offload_experts",
]
