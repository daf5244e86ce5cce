"""Models of transformers with KPT's layers, converted there and back, and dense ones made sparse."""

from ._names import accept_checkpoint_names
from .converting import to_kpt_layers, to_transformers
from .experts import VariantFeedForwardExpert
from .kpt_block import KptMoEBlock
from .upcycling import Layers, load_upcycled, upcycle

__all__ = [
    "KptMoEBlock",
    "Layers",
    "VariantFeedForwardExpert",
    "accept_checkpoint_names",
    "load_upcycled",
    "to_kpt_layers",
    "to_transformers",
    "upcycle",
]
