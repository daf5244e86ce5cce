"""Less memory for experts: on the device only those in use (inference), fewer saved activations (training)."""

from .activation_memory import CheckpointedExperts, checkpoint_experts
from .cache import LayerStatistics
from .offloading import Offloading, offload_experts

__all__ = ["CheckpointedExperts", "LayerStatistics", "Offloading", "checkpoint_experts", "offload_experts"]
