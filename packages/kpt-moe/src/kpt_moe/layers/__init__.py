"""Layers."""

from .config import MoEConfig
from .layer import MoELayer

__all__ = ["MoEConfig", "MoELayer"]
