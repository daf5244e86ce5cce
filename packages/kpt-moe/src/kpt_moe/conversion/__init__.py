"""Models of transformers with KPT's layers, converted there and back, and dense ones made sparse."""

from .experts import VariantFeedForwardExpert
from .to_kpt import KptMoEBlock, to_kpt_layers
from .to_transformers import to_transformers
from .upcycling import Layers, upcycle

__all__ = ["KptMoEBlock", "Layers", "VariantFeedForwardExpert", "to_kpt_layers", "to_transformers", "upcycle"]
