"""Layers: a router and its experts."""

from .config import UNSET, MoEConfig
from .layer import MoELayer
from .shared import SharedExperts
from .variants import LAYERS, AdaptiveMoELayer, GLaMStyleMoE, SparseMoELayer, SwitchTransformerMoE, create_moe_layer

__all__ = [
    "LAYERS",
    "UNSET",
    "AdaptiveMoELayer",
    "GLaMStyleMoE",
    "MoEConfig",
    "MoELayer",
    "SharedExperts",
    "SparseMoELayer",
    "SwitchTransformerMoE",
    "create_moe_layer",
]
