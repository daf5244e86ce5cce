"""`attention.dense` by PyTorch's own flash attention for CPUs, where it is right: inference, full or causal.

Its exponential is an approximation: of float32 inputs its log-sum-exp is off by 1e-5 (torch 2.13, AVX2), and gradients
by ten times what float32 explains. So it serves calls that ask for neither.
"""

from typing import Any

import torch
from torch import Tensor

from kpt_core import Call, Refusal


def unsupported(call: Call) -> Refusal | str | None:
    """Return why PyTorch's kernel does not take a call."""
    for name in ("intervals", "blocks", "bias", "alibi_slopes", "relative_bias", "sinks"):
        if getattr(call, name) is not None:
            return Refusal("{name} is given; PyTorch's kernel takes causality alone", name=name)
    if call.return_lse:
        return "the log-sum-exp is asked for, which PyTorch's kernel approximates"
    if call.softcap or call.dropout:
        return "PyTorch's kernel has no softcap, and its dropout draws from the global generator"
    q, k, v = call.q, call.k, call.v
    if q.shape[3] != v.shape[3]:
        return Refusal("dims {dim} and {other}; PyTorch's kernel wants equal ones", dim=q.shape[3], other=v.shape[3])
    if not _sees_all(call) and (call.position != 0 or q.shape[2] > k.shape[2]):
        return Refusal("the first query stands at {position}; PyTorch's kernel wants 0", position=call.position)
    if not (q.numel() and k.numel()):
        return "there is nothing to compute"
    return None


def _sees_all(call: Call) -> bool:
    """Return whether every query sees every key, as the one of a decoding step does."""
    return not call.causal or call.position + 1 >= call.k.shape[2]


def forward(call: Call) -> Any:
    """Return the output alone."""
    q, k, v = call.q, call.k, call.v
    groups = q.shape[1] // k.shape[1]
    if _sees_all(call):  # queries of the heads of a group are rows of one head: no key is repeated
        rows = q.unflatten(1, (k.shape[1], groups)).flatten(2, 3)
        if rows.shape[2] == 1 and rows.dtype is not torch.float32:  # of two rows its product takes half as long
            rows = rows.expand(-1, -1, 2, -1)
        found = _attend(rows, k, v, False, call.scale)[:, :, : groups * q.shape[2]]
        return found.unflatten(2, (groups, -1)).flatten(1, 2), None
    # The keys that some query sees; repeating them is little beside the products.
    k, v = (each[:, :, : q.shape[2]].repeat_interleave(groups, 1) if groups > 1 else each[:, :, : q.shape[2]]
            for each in (k, v))  # fmt: skip
    return _attend(q, k, v, True, call.scale), None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    # It reads rows as if they were contiguous, whatever their strides are.
    rows = [each if each.stride(3) == 1 else each.contiguous() for each in (q, k, v)]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, causal, scale=scale)[0]
    return out.contiguous()
