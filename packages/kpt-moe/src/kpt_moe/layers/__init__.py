"""Layers: a router and its experts."""

from .config import MoEConfig
from .layer import MoELayer
from .shared import SharedExperts
from .variants import (
    LAYERS,
    AdaptiveMoELayer,
    GLaMStyleMoE,
    SparseMoELayer,
    SwitchTransformerMoE,
    create_moe_layer,
)

__all__ = [
    "LAYERS",
    "AdaptiveMoELayer",
    "GLaMStyleMoE",
    "MoEConfig",
    "MoELayer",
    "SharedExperts",
    "SparseMoELayer",
    "SwitchTransformerMoE",
    "create_moe_layer",
]
