"""Which calls the kernels refuse, beside those that their rows in the table rule out."""

from functools import cache

import torch
from torch import Tensor

from kpt_core import Call, Refusal
from kpt_triton.moe import gating, sorting

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def experts(call: Call) -> str | Refusal | None:
    """Why a call of `moe.experts` is not for its kernel, or None."""
    if call.top_k_weights.dtype is torch.float64:
        return "routing weights in float64; needs float32, bfloat16 or float16"
    if call.gate_up_proj.shape[0] > sorting.MAX_EXPERTS:
        most = sorting.MAX_EXPERTS
        return Refusal("{here} experts; this kernel sorts by {most} at most", here=len(call.gate_up_proj), most=most)
    if call.top_k_index.numel() > sorting.MAX_PAIRS:
        return "more than 2**30 pairs of token and choice, which this kernel does not sort"
    return _refusal_of_float8(call.x, call.gate_up_proj, call.down_proj)


def scaled_grouped_mm(call: Call) -> str | None:
    """Why a call of `moe.scaled_grouped_mm` is not for its kernel, or None."""
    if call.out_dtype is torch.float64:
        return "a result in float64; needs float32, bfloat16 or float16"
    return _refusal_of_float8(call.x, call.weight)


def top_k_gating(call: Call) -> str | Refusal | None:
    """Why a call of `moe.top_k_gating` is not for its kernel, or None."""
    here, most, bias = call.logits.shape[1], gating.MAX_EXPERTS, call.correction_bias
    if here > most:
        return Refusal("{here} experts; this kernel holds the scores of {most} at most", here=here, most=most)
    return None if bias is None or bias.dtype is torch.float32 else "a correction_bias in float64; needs float32"


def _refusal_of_float8(x: Tensor, *weights: Tensor) -> str | None:
    """Why a device can't read these weights, or None."""
    if all(tensor.dtype not in _FLOAT8 for tensor in (x, *weights)) or not _too_old(x.device):
        return None
    return "8-bit numbers need sm89 or newer"


@cache
def _too_old(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9)
