"""Serve the experts of Hugging Face models: importing this module registers the experts implementation `"kpt"`.

It changes nothing else of transformers. FP8 checkpoints are loaded by `kpt_fp8.transformers.load`, which keeps them in
8 bits on every device; transformers widens them where it has no kernels for them.

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
    FP8ExpertsInterface.register(NAME, kpt_fp8_experts_forward)
