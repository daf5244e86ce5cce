"""Mixture-of-Experts for PyTorch: ops, routers and layers that run on whatever accelerator is there."""

from .activations import Activation
from .composed_experts import composed_experts
from .expert_networks import ExpertNetwork, FeedForwardExpert
from .experts import experts
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .layers import MoEConfig, MoELayer
from .permutation import Permutation, sort_by_expert
from .routers import LinearRouter, Router, TopKRouter
from .routing import Routing

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ExpertNetwork",
    "FeedForwardExpert",
    "LinearRouter",
    "MoEConfig",
    "MoELayer",
    "Permutation",
    "Router",
    "Routing",
    "TopKRouter",
    "composed_experts",
    "experts",
    "grouped_mm",
    "grouped_mm_wgrad",
    "sort_by_expert",
]
