"""Which calls the kernels refuse, beside those that their rows in the table rule out: a sentence, or None."""

from typing import Any

import torch

from kpt_triton.chips import no_codes

from .gating import MAX_EXPERTS as MOST_SCORES
from .sorting import MAX_EXPERTS, MAX_PAIRS

_TOO_MANY_EXPERTS = f"more than {MAX_EXPERTS} experts, which this kernel does not sort"
_TOO_MANY_PAIRS = (
    f"more than 2**{MAX_PAIRS.bit_length() - 1} pairs of token and choice, which this kernel does not sort"
)
_TOO_MANY_SCORES = f"more than {MOST_SCORES} experts, whose scores this kernel does not hold"


def experts(call: Any) -> str | None:
    """Return why a call of `moe.experts` is not for its kernel, or None."""
    if call.top_k_weights.dtype is torch.float64:
        return "routing weights in float64; needs float32, bfloat16 or float16"
    if call.gate_up_proj.shape[0] > MAX_EXPERTS:
        return _TOO_MANY_EXPERTS
    if call.top_k_index.numel() > MAX_PAIRS:
        return _TOO_MANY_PAIRS
    x = call.x
    return no_codes(x.device, x.dtype, call.gate_up_proj.dtype) or no_codes(x.device, x.dtype, call.down_proj.dtype)


def scaled_grouped_mm(call: Any) -> str | None:
    """Return why a call of `moe.scaled_grouped_mm` is not for its kernel, or None."""
    if call.out_dtype is torch.float64:
        return "a result in float64; needs float32, bfloat16 or float16"
    return no_codes(call.x.device, call.x.dtype, call.weight.dtype)


def top_k_gating(call: Any) -> str | None:
    """Return why a call of `moe.top_k_gating` is not for its kernel, or None."""
    bias = call.correction_bias
    if call.logits.shape[1] > MOST_SCORES:
        return _TOO_MANY_SCORES
    return None if bias is None or bias.dtype is torch.float32 else "a correction_bias in float64; needs float32"
