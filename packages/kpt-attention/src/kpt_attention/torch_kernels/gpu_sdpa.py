"""`attention.dense` on GPUs by PyTorch's `scaled_dot_product_attention`: full or causal, perhaps with a bias.

Which of its kernels runs (FlashAttention-2, cuDNN, the memory-efficient one, or the plain one that has all scores in
memory) torch decides. Float64, which the plain one alone takes, is refused.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kpt_core import Call, Refusal

#: What else changes scores, or which of them count.
_OTHERS = ("intervals", "blocks", "alibi_slopes", "relative_bias", "sinks")
#: Dimensions up to which there is a kernel for fewer heads of keys than of queries.
_MOST_DIM = 256


def unsupported(call: Call) -> Refusal | str | None:
    """Return why PyTorch's kernels do not take a call."""
    for name in _OTHERS:
        if getattr(call, name) is not None:
            return Refusal("{name} is given; SDPA takes causality and a bias alone", name=name)
    if call.return_lse:
        return "the log-sum-exp is asked for, which SDPA does not return"
    if call.softcap or call.dropout:
        return "SDPA has no softcap, and its dropout draws from the global generator"
    q, k = call.q, call.k
    if q.dtype is torch.float64:
        return "float64; the fused kernels of SDPA take 32 bits and 16"
    if not (q.numel() and k.numel() and call.v.numel()):
        return "there is nothing to compute"
    if _sees_all(call):
        return _bias_refusal(call)
    if call.bias is not None:
        return "a bias beside causality; SDPA takes one of them"
    if call.position < 0 or call.position + q.shape[2] > k.shape[2]:
        return Refusal(
            "queries from {position} on, beside {keys} keys; SDPA wants every query at a key",
            position=call.position, keys=k.shape[2],
        )  # fmt: skip
    return None


def _bias_refusal(call: Call) -> Refusal | None:
    bias, dtype = call.bias, call.q.dtype
    if bias is not None and bias.dtype is not dtype:  # rounding it would be an error of half a rounding of a score
        return Refusal("a bias in {bias}; SDPA wants {dtype}, as q has", bias=bias.dtype, dtype=dtype)
    return None


def _sees_all(call: Call) -> bool:
    """Return whether every query sees every key, as the one of a decoding step does."""
    return not call.causal or call.position + 1 >= call.k.shape[2]


def forward(call: Call) -> Any:
    """Return the output alone, contiguous; autograd differentiates it."""
    q, k, v, mask = call.q, call.k, call.v, call.bias
    causal = False
    if not _sees_all(call):
        queries, seen = q.shape[2], call.position + q.shape[2]
        k, v = k[:, :, :seen], v[:, :, :seen]  # what no query sees
        if call.position == 0:
            causal = True
        else:
            mask = causal_lower_right(queries, seen)
    grouped = q.shape[1] != k.shape[1]
    if grouped and not _flash(call):
        # The memory-efficient kernel knows no groups: torch would take the plain one.
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        grouped = False
    out: Tensor = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=grouped
    )
    return out.contiguous(), None


def _flash(call: Call) -> bool:
    """Return whether a kernel that knows groups of heads takes a call."""
    dims = call.q.shape[3], call.v.shape[3]
    return call.bias is None and call.q.dtype.itemsize == 2 and dims[0] == dims[1] <= _MOST_DIM
