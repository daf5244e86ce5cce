"""Which calls the kernels refuse, beside those that their rows in the table rule out: a sentence, or None."""

from typing import Any

import torch
from torch import Tensor

from kpt_triton.chips import no_float8

from .gating import MAX_EXPERTS as MOST_SCORES
from .sorting import MAX_EXPERTS, MAX_PAIRS

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
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
    return _refusal_of_float8(call.x, call.gate_up_proj, call.down_proj)


def scaled_grouped_mm(call: Any) -> str | None:
    """Return why a call of `moe.scaled_grouped_mm` is not for its kernel, or None."""
    if call.out_dtype is torch.float64:
        return "a result in float64; needs float32, bfloat16 or float16"
    return _refusal_of_float8(call.x, call.weight)


def top_k_gating(call: Any) -> str | None:
    """Return why a call of `moe.top_k_gating` is not for its kernel, or None."""
    bias = call.correction_bias
    if call.logits.shape[1] > MOST_SCORES:
        return _TOO_MANY_SCORES
    return None if bias is None or bias.dtype is torch.float32 else "a correction_bias in float64; needs float32"


def _refusal_of_float8(x: Tensor, *weights: Tensor) -> str | None:
    """Return why a device can't read these weights, or None."""
    if all(tensor.dtype not in _FLOAT8 for tensor in (x, *weights)):
        return None
    return no_float8(x.device)
