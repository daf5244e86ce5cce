"""Mixture-of-Experts for PyTorch: ops, routers and layers that run on whatever accelerator is there."""

from .activations import Activation
from .composed_experts import composed_experts
from .experts import experts
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .layer import MoEConfig, MoELayer
from .permutation import Permutation, sort_by_expert
from .routing import Routing, TopKRouter

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "MoEConfig",
    "MoELayer",
    "Permutation",
    "Routing",
    "TopKRouter",
    "composed_experts",
    "experts",
    "grouped_mm",
    "grouped_mm_wgrad",
    "sort_by_expert",
]
