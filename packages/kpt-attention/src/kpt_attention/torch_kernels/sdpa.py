"""`attention.dense` by PyTorch's own flash attention for CPUs, where it is right: inference, full or causal.

Its exponential is an approximation: of float32 inputs its log-sum-exp is off by 1e-5 (torch 2.13, AVX2), and gradients
by ten times what float32 explains. So it serves calls that ask for neither.
"""

from typing import Any

import torch

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
    if q.shape[1] != k.shape[1] or q.shape[3] != v.shape[3]:
        return Refusal(
            "{heads} heads of queries and {ours} of keys, dims {dim} and {other}; PyTorch's kernel wants equal ones",
            heads=q.shape[1], ours=k.shape[1], dim=q.shape[3], other=v.shape[3],
        )  # fmt: skip
    if call.causal and (call.position != 0 or q.shape[2] > k.shape[2]):
        return Refusal("the first query stands at {position}; PyTorch's kernel wants 0", position=call.position)
    if not (q.numel() and k.numel()):
        return "there is nothing to compute"
    return None


def forward(call: Call) -> Any:
    """The output alone."""
    k, v = call.k, call.v
    if call.causal and k.shape[2] > call.q.shape[2]:  # keys that no query sees
        k, v = k[:, :, : call.q.shape[2]], v[:, :, : call.q.shape[2]]
    # It reads rows as if they were contiguous, whatever their strides are.
    rows = [each if each.stride(3) == 1 else each.contiguous() for each in (call.q, k, v)]
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, call.causal, scale=call.scale)
    return out.contiguous(), None
