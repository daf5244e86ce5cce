"""Run FP8 checkpoints of Hugging Face models with weights that stay 8-bit: `load`.

Importing this module registers the quantisation method "kpt_fp8" with transformers; what transformers has stays.
"""

from .loading import load
from .quantizer import METHOD, KptFP8Config, KptFP8Quantizer

__all__ = ["METHOD", "KptFP8Config", "KptFP8Quantizer", "load"]
