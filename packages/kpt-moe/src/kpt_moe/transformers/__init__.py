"""Serve the experts of Hugging Face models: importing this module registers the experts implementation `"kpt"`.

import kpt_moe.transformers
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="kpt")
"""

from transformers.integrations.moe import ExpertsInterface

from .activation import known_activation
from .experts import NAME, kpt_experts_forward, kpt_fp8_experts_forward

__all__ = ["NAME", "known_activation", "kpt_experts_forward", "kpt_fp8_experts_forward"]

ExpertsInterface.register(NAME, kpt_experts_forward)
try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
except ImportError:  # before transformers had one
    pass
else:
    from .fp8_loading import replace_quantizer

    FP8ExpertsInterface.register(NAME, kpt_fp8_experts_forward)
    replace_quantizer()
